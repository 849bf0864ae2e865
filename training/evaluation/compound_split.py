"""Compound-split BLEU: the count behind the paper's scores (section 6.1), not to be compared with sacreBLEU.

It comes from a chain of scripts that the authors published as `get_ende_bleu.sh`: typographic quotes and full-width
punctuation become plain (`replace-unicode-punctuation.perl`), Moses tokenises (`tokenizer.perl -l de`), what a hyphen
joins is split into `left ##AT##-##AT## right`, and `multi-bleu.perl` counts n-grams. Splitting makes three words,
often right ones, out of one, which is why the figure is mostly higher than sacreBLEU's of the same output.

This module rewrites what those scripts do to German and English text. One thing differs: the German opening quote „
becomes a plain one too, as in the references that the authors had, which were prepared so beforehand.

Nothing of the package is imported here, so that `evaluate` can copy the file beside a metric.
"""

import re
from string import ascii_letters, ascii_uppercase

import regex
from sacrebleu import BLEU


LANGUAGES = ("de", "en")

_QUOTES = {"”": '"', "“": '"', "„": '"', "《": '"', "》": '"', "」": '"', "「": '"', "’": "'"}
_FULL_WIDTH = dict(zip("，、∶：？）！（；～━〈〉【】％０１２３４５６７８９", ",,::?)!(;~-<>[]%0123456789"))
_PLAIN = str.maketrans({**_QUOTES, **_FULL_WIDTH, "…": "..."})

# Perl's IsAlpha, IsAlnum and IsN.
_ALPHA, _ALNUM, _NUMBER = r"\p{Alphabetic}", r"\p{Alphabetic}\p{Nd}", r"\p{N}"
_SPECIAL = regex.compile(rf"([^{_ALNUM}\s.'`,\-])")
_COMMAS = [
    (regex.compile(rf"([^{_NUMBER}]),"), r"\1 , "),
    (regex.compile(rf",([^{_NUMBER}])"), r" , \1"),
    (regex.compile(rf"({_NUMBER}),$"), r"\1 ,"),
]
_APOSTROPHES = {
    "de": [(regex.compile("'"), " ' ")],
    "en": [  # in this order: it's -> it 's, 1990's -> 1990 's, the others stand alone
        (regex.compile(rf"([^{_ALPHA}])'([^{_ALPHA}])"), r"\1 ' \2"),
        (regex.compile(rf"([^{_ALPHA}{_NUMBER}])'([{_ALPHA}])"), r"\1 ' \2"),
        (regex.compile(rf"([{_ALPHA}])'([^{_ALPHA}])"), r"\1 ' \2"),
        (regex.compile(rf"([{_ALPHA}])'([{_ALPHA}])"), r"\1 '\2"),
        (regex.compile(rf"({_NUMBER})'(s)"), r"\1 '\2"),
    ],
}
_ESCAPES = {"&": "&amp;", "|": "&#124;", "<": "&lt;", ">": "&gt;", "'": "&apos;", '"': "&quot;"}
_ESCAPES = str.maketrans({**_ESCAPES, "[": "&#91;", "]": "&#93;"})

# Behind these, Moses leaves a full stop where it is, in the middle of a line. Words with a full stop inside (z.B, U.S)
# need no entry, and neither do words before a small letter.
_TITLES = (
    "Adj Adm Adv Art Asst Bart Bldg Brig Bros Capt Cmdr Col Comdr Con Corp Cpl DR Dr Ens Gen Gov Hon Hosp Insp Lt MM "
    "MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms Msgr No Nos Nr Op Ord Pfc Ph Prof Pvt Rep Reps Res Rev Rt Sen Sens Sfc "
    "Sgt Sr St Supt Surg pp vs"
)
_GERMAN = (
    "BSE Buchst Ca Chr Co Dkr Ltd Mio Mrd MwSt SA Std Zt bzgl bzw ca dergl dgl etc evtl ff ggf jun sen sog sogen spp "
    "usf usw vgl zzt"
)
_ENGLISH = "Apr Aug Dec Drs Feb Hr Jan Jul Jun Mar Nov Oct Rs Sep rev v"
_ROMAN = "I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX"
_ORDINALS = {str(number) for number in range(1, 100)}  # the 3. of German is English's 3rd
_ONLY_BEFORE_NUMBERS = {"de": set(), "en": {"No", "Art", "pp"}}
_ABBREVIATIONS = {
    "de": {*ascii_letters, *f"{_TITLES} {_GERMAN} {_ROMAN} {_ROMAN.lower()}".split()} | _ORDINALS,
    "en": {*ascii_uppercase, *f"{_TITLES} {_ENGLISH}".split()} - _ONLY_BEFORE_NUMBERS["en"],
}


def plain_punctuation(text: str) -> str:
    """Typographic quotes, the ellipsis and full-width punctuation and digits as their plain counterparts.

    >>> plain_punctuation("„Ja“, sagte sie…")
    '"Ja", sagte sie...'
    """
    return re.sub("[。．] *", ". ", text).translate(_PLAIN)


def moses_tokenize(text: str, language: str = "de") -> str:
    """Words and punctuation of a line with spaces between them, special characters escaped, as Moses has it.

    Args:
        text (`str`): One line of raw text.
        language (`str`): One of `LANGUAGES`. It matters for apostrophes and abbreviations.

    >>> moses_tokenize("Dr. Weiß zahlt 3,5 Mio. Euro, sagt er.")
    'Dr. Weiß zahlt 3,5 Mio. Euro , sagt er .'
    """
    # The order is that of Perl's: every kind of space first, then control characters, which leave no space behind.
    text = regex.sub(r"[\x00-\x1f]", "", regex.sub(r"\s+", " ", text)).strip(" ")
    text = _SPECIAL.sub(r" \1 ", re.sub(" +", " ", text))
    # Several full stops are one word. Control characters are gone, so that one of them can stand for each.
    text = re.sub(r"\.{2,}", lambda dots: f" {chr(0) * len(dots[0])} ", text)
    for pattern, replacement in [*_COMMAS, *_APOSTROPHES[language]]:
        text = pattern.sub(replacement, text)
    text = " ".join(_split_full_stops(text.rstrip(" ").split(" "), language))
    text = re.sub(r"\.' ?$", " . '", text)
    return re.sub(" +", " ", text).strip(" ").replace(chr(0), ".").translate(_ESCAPES)


def _split_full_stops(words: list[str], language: str) -> list[str]:
    """Full stops set apart from the words that they end, but not from abbreviations."""
    result = []
    for word, following in zip(words, [*words[1:], None]):
        stem = word[:-1]
        if word.endswith(".") and stem and not (following is not None and _keeps_stop(stem, following, language)):
            word = f"{stem} ."
        result.append(word)
    return result


def _keeps_stop(stem: str, following: str, language: str) -> bool:
    """Whether the full stop behind `stem` belongs to it, going by the word that follows on the line."""
    if "." in stem and regex.search(_ALPHA, stem):
        return True
    if stem in _ABBREVIATIONS[language] or regex.match(r"\p{Lowercase}", following):
        return True
    return stem in _ONLY_BEFORE_NUMBERS[language] and re.match("[0-9]", following) is not None


def split_compounds(text: str) -> str:
    """What a hyphen joins, as three words.

    Like the script, this takes bytes for characters and does not look back over what it has replaced: of two hyphens
    with a single ASCII letter between them, the second stays.

    >>> split_compounds("ein rot-weißes Auto")
    'ein rot ##AT##-##AT## weißes Auto'
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", text.encode("utf-8")).decode("utf-8")


class CompoundSplitBLEU(BLEU):
    """sacreBLEU's BLEU without smoothing, over words as section 6.1 has them: the arithmetic of `multi-bleu.perl`.

    Args:
        language (`str`, *optional*): One of `LANGUAGES`; `None` for text that Moses has tokenised already, of which
            only the compounds are to be split.
        lowercase (`bool`): Ignore case.
    """

    def __init__(self, language: str | None = "de", lowercase: bool = False):
        if language not in (*LANGUAGES, None):
            raise ValueError(f"Compound-split BLEU knows the languages {', '.join(LANGUAGES)}, got {language!r}.")
        super().__init__(lowercase=lowercase, force=True, tokenize="none", smooth_method="none")
        self.language = language
        self.tokenizer_signature = f"moses-{language}+atat" if language else "none+atat"

    def _preprocess_segment(self, sent: str) -> str:
        # The one place that sacreBLEU's metrics have for this. Case goes last: abbreviations are told by it.
        text = sent if self.language is None else moses_tokenize(plain_punctuation(sent), self.language)
        text = split_compounds(text)
        return text.lower() if self.lowercase else text
