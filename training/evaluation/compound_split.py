"""Compound-split BLEU, the metric of the paper (section 6.1). It is not comparable with sacreBLEU.

The authors published it as a chain of scripts, `get_ende_bleu.sh`:

1. `replace-unicode-punctuation.perl` replaces typographic quotes and full-width punctuation by ASCII.
2. The Moses tokeniser (`tokenizer.perl -l de`) splits the text into tokens.
3. Hyphenated compounds are split into `left ##AT##-##AT## right`.
4. `multi-bleu.perl` computes BLEU.

Splitting turns one token into three, often matching ones, so the score is usually higher than sacreBLEU's.

This module reimplements the effect of those scripts on German and English text, with one difference: the German
opening quote „ is replaced as well, as it was in the authors' references.

The module imports only `choices` from this package: `evaluate` copies both files beside a metric.
"""

import re
from string import ascii_letters, ascii_uppercase

import regex
from sacrebleu import BLEU

from .choices import LANGUAGES


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

# Moses does not split a full stop from these abbreviations in the middle of a line. Words with an internal full stop
# (z.B, U.S) and words before a lower-case letter need no entry.
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
_ORDINALS = {str(number) for number in range(1, 100)}  # German writes 3rd as 3.
_ONLY_BEFORE_NUMBERS = {"de": set(), "en": {"No", "Art", "pp"}}
_ABBREVIATIONS = {
    "de": {*ascii_letters, *f"{_TITLES} {_GERMAN} {_ROMAN} {_ROMAN.lower()}".split()} | _ORDINALS,
    "en": {*ascii_uppercase, *f"{_TITLES} {_ENGLISH}".split()} - _ONLY_BEFORE_NUMBERS["en"],
}


def plain_punctuation(text: str) -> str:
    """Replace typographic quotes, the ellipsis, and full-width punctuation and digits by their ASCII counterparts.

    >>> plain_punctuation("„Ja“, sagte sie…")
    '"Ja", sagte sie...'
    """
    return re.sub("[。．] *", ". ", text).translate(_PLAIN)


def moses_tokenize(text: str, language: str = "de") -> str:
    """Tokenise a line like Moses: separate words and punctuation by spaces, and escape special characters.

    Args:
        text (`str`): One line of raw text.
        language (`str`): One of `LANGUAGES`; it determines the rules for apostrophes and abbreviations.

    >>> moses_tokenize("Dr. Weiß zahlt 3,5 Mio. Euro, sagt er.")
    'Dr. Weiß zahlt 3,5 Mio. Euro , sagt er .'
    """
    # In the order of the Perl script: normalise white space, then delete control characters without a space.
    text = regex.sub(r"[\x00-\x1f]", "", regex.sub(r"\s+", " ", text)).strip(" ")
    text = _SPECIAL.sub(r" \1 ", re.sub(" +", " ", text))
    # A run of full stops is one token. NUL can stand for each of them, since control characters are gone.
    text = re.sub(r"\.{2,}", lambda dots: f" {chr(0) * len(dots[0])} ", text)
    for pattern, replacement in [*_COMMAS, *_APOSTROPHES[language]]:
        text = pattern.sub(replacement, text)
    text = " ".join(_split_full_stops(text.rstrip(" ").split(" "), language))
    text = re.sub(r"\.' ?$", " . '", text)
    return re.sub(" +", " ", text).strip(" ").replace(chr(0), ".").translate(_ESCAPES)


def _split_full_stops(words: list[str], language: str) -> list[str]:
    """Split full stops from the ends of words, except abbreviations."""
    result = []
    for word, following in zip(words, [*words[1:], None]):
        stem = word[:-1]
        if word.endswith(".") and stem and not (following is not None and _keeps_stop(stem, following, language)):
            word = f"{stem} ."
        result.append(word)
    return result


def _keeps_stop(stem: str, following: str, language: str) -> bool:
    """True if the full stop after `stem` is part of an abbreviation, given the following word of the line."""
    if "." in stem and regex.search(_ALPHA, stem):
        return True
    if stem in _ABBREVIATIONS[language] or regex.match(r"\p{Lowercase}", following):
        return True
    return stem in _ONLY_BEFORE_NUMBERS[language] and re.match("[0-9]", following) is not None


def split_compounds(text: str) -> str:
    """Split hyphenated compounds into three tokens.

    Like the original script, the pattern works on bytes, and matches do not overlap: of two hyphens around a single
    ASCII letter, the second is not split.

    >>> split_compounds("ein rot-weißes Auto")
    'ein rot ##AT##-##AT## weißes Auto'
    """
    return re.sub(rb"(\S)-(\S)", rb"\1 ##AT##-##AT## \2", text.encode("utf-8")).decode("utf-8")


class CompoundSplitBLEU(BLEU):
    """BLEU by sacreBLEU without smoothing, as in `multi-bleu.perl`, on compound-split tokens (section 6.1).

    Args:
        language (`str`, *optional*): One of `LANGUAGES`; `None` if the text is already tokenised by Moses, so that
            only the compounds have to be split.
        lowercase (`bool`): Ignore case.
    """

    def __init__(self, language: str | None = "de", lowercase: bool = False):
        if language not in (*LANGUAGES, None):
            raise ValueError(f"Compound-split BLEU supports the languages {', '.join(LANGUAGES)}, got {language!r}.")
        super().__init__(lowercase=lowercase, force=True, tokenize="none", smooth_method="none")
        self.language = language
        self.tokenizer_signature = f"moses-{language}+atat" if language else "none+atat"

    def _preprocess_segment(self, sent: str) -> str:
        # The preprocessing hook of sacreBLEU's metrics. Lowercasing comes last, because abbreviations depend on case.
        text = sent if self.language is None else moses_tokenize(plain_punctuation(sent), self.language)
        text = split_compounds(text)
        return text.lower() if self.lowercase else text
