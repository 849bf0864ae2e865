"""Warnings about first lines that look like a header, and about sides that look swapped.

Only clear signs count: languages of one script are never compared here.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from transformers.models.whisper.tokenization_whisper import LANGUAGES

from .readers import read_pairs


NUM_PAIRS = 200  # that are looked at
HEADER = {"source", "target", "src", "tgt", "trg"}
# Writing systems other than Latin, by the first word of their letters' Unicode names, and languages that use them.
SCRIPTS = {
    "ARABIC": "ar ckb fa ps sd ug ur",
    "ARMENIAN": "hy",
    "BENGALI": "as bn",
    "CJK": "ja yue zh",
    "CYRILLIC": "ba be bg kk ky mk mn ru sr tg tt uk",
    "DEVANAGARI": "hi mr ne sa",
    "ETHIOPIC": "am ti",
    "GEORGIAN": "ka",
    "GREEK": "el",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "HANGUL": "ko",
    "HEBREW": "he yi",
    "KANNADA": "kn",
    "KHMER": "km",
    "LAO": "lo",
    "MALAYALAM": "ml",
    "MYANMAR": "my",
    "SINHALA": "si",
    "TAMIL": "ta",
    "TELUGU": "te",
    "THAI": "th",
    "TIBETAN": "bo",
}
SCRIPT_OF_LANGUAGE = dict.fromkeys(LANGUAGES, "LATIN") | {
    code: script for script, codes in SCRIPTS.items() for code in codes.split()
}
MIN_LETTERS = 20
MIN_SHARE = 0.8  # of the letters in one script


def warnings(files: list[str], langs: tuple[str, str]) -> Iterator[str]:
    """Yield messages about the first pairs of files that `read_pairs` reads.

    Args:
        files (`list[str]`): Two parallel files, or one file of pairs.
        langs (`tuple[str, str]`): Language codes of source and target.
    """
    pairs = [(source, target) for _, source, target in islice(read_pairs(files, langs), NUM_PAIRS)]
    if pairs and is_header(*pairs[0], langs):
        shown = ", ".join(map(repr, pairs[0]))
        yield f"{files[0]}:1: {shown} looks like a header, but is used as a pair. Remove the line."
    found = [dominant_script(texts) for texts in zip(*pairs)]
    expected = [SCRIPT_OF_LANGUAGE.get(re.split("[-_]", lang.lower())[0]) for lang in langs]
    if pairs and None not in found and found == expected[::-1] != expected:
        scripts = " and ".join(f"the {lang} side is {script.title()}" for lang, script in zip(langs, found))
        yield f"{', '.join(files)}: source and target look swapped. In the first {len(pairs)} pairs, {scripts}."


def is_header(source: str, target: str, langs: tuple[str, str]) -> bool:
    """Return `True` for a pair of different column names: those in `HEADER`, the run's language codes, or English
    names of languages."""
    words = {source.strip().lower(), target.strip().lower()}
    codes = {lang.lower() for lang in langs}
    return len(words) == 2 and (words <= HEADER or words == codes or words <= set(LANGUAGES.values()))


def dominant_script(texts: Iterable[str]) -> str | None:
    """Script of most letters of some texts, a key of `SCRIPTS` or "LATIN"; `None` if no script is dominant."""
    counts = Counter(
        unicodedata.name(letter, "").split(" ")[0] for text in texts for letter in text if letter.isalpha()
    )
    counts["CJK"] += counts.pop("HIRAGANA", 0) + counts.pop("KATAKANA", 0)
    script, count = counts.most_common(1)[0]
    return script if count >= max(MIN_LETTERS, MIN_SHARE * counts.total()) else None
