"""Tokenizers of MarianMT and FSMT checkpoints, each as one `tokenizers` object.

The result is data, in one file; SentencePiece is needed for the conversion only.
"""

import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import FSMTTokenizer, MarianTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.pieces import run_boundaries
from ..data.two_sided_tokenizer import TwoSidedTokenizer
from ..json_records import read_record


WORD = "▁"  # SentencePiece's space
END_OF_WORD = "</w>"
VERSION = "#version:"  # begins the codes of subword-nmt
BREAK = "\ufff0"  # an unassigned code point that ends a grapheme; no text has it
SETTINGS = {
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
    "split_special_tokens": True,  # "</s>" in the input text is plain text, not the end token
}
NFKC = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")  # normalisations of SentencePiece

# Texts on which normalisers and segmentations tend to differ.
HARD_STRINGS = [
    *("", " ", "   ", "\t", "\n", "\u3000", WORD, f"a{WORD}{WORD}b{WORD}", f"{WORD}a", "\x00", "\u200b", "x" * 300),
    "  two  leading, inner and trailing  ",
    "\ttab\tand\nnewline\r\n",
    "no\u00a0break, thin\u202f, em\u2003, wide\u3000",
    "line\u2028and\u2029paragraph",
    "zero\u200bwidth, soft\u00adhyphen, word\u2060joiner",
    "\ufeffbyte order mark",
    "bell\x07, null\x00, delete\x7f, \x85",
    "\u200eleft\u200f right \u202abidi\u202c",
    "private \ue000 and \U0010ffff",
    *(
        unicodedata.normalize("NFD", text)
        for text in ("café, Äpfel, ñ", "Tiếng Việt rất đẹp, ữ ờ", "й ё", "한국", "ぱび")
    ),
    "z\u0327\u0351a\u0300\u0301\u0302l",
    "ⓝ\u0338 ²\u0338",  # marks that compose with nothing
    *r"""
a
.
>>
<<
<unk>
a</s>b
</s> <unk> <s> <pad>
a >> b << c
ALL CAPS and camelCase
don't — can't
„low“ «guillemets» ‘single’ … – — ‐ ‑ −
\n \t " ' ` ^ ~ | { } [ ]
1,234.56 € $5 50%
https://example.org/?q=a%20b&c=d#e_f
user@example.org
ﬁne ½ ² ™ № Ⅷ ㌔ ㍿ ﷺ
ｆｕｌｌ １２３ ｶﾞｷﾞ ﾊﾟ
𝔘𝔫𝔦 𝒙²
Tiếng Việt rất đẹp
Привет, мир! Ёлка
Latin и кириллица mixedслово
Γειά σου Κόσμε
שָׁלוֹם עולם
مرحبا العَرَبِيَّة
नमस्ते दुनिया क़लम
ক্ষুদ্র বাংলা
ภาษาไทยน้ำ
你好，世界。漢字
こんにちは カタカナ
안녕하세요 세계
👍 👍🏽 ❤️ 👩‍👩‍👧 🇩🇪 1️⃣
a👍b 👍👍 c
""".strip().split("\n"),
]


class Difference(NamedTuple):
    """A text, or the ids of one, that two tokenizers treat differently."""

    given: str | list[int]
    expected: list[int] | str
    found: list[int] | str


@dataclass(frozen=True)
class Comparison:
    """Comparison of a converted tokenizer with the original one."""

    what: str
    compared: int
    different: int
    first: Difference | None = None

    def __str__(self) -> str:
        equal = f"{self.what}: {self.compared - self.different:,} of {self.compared:,} equal"
        if self.first is None:
            return equal
        return f"{equal}; first difference: {self.first.given!r}: {self.first.found!r}, not {self.first.expected!r}"


@dataclass(frozen=True)
class TokenizerReport:
    """Result of the self-check of a conversion.

    Attributes:
        lines: Ids of the given texts.
        hard_strings: Ids of `HARD_STRINGS`.
        decoded: Text of every single id of the vocabulary, and of the ids of the given target texts.
        rows: For each id of the tokenizer, the row of the original embedding that it stands for, if these are not
            the same. For sources, the converted encoder then needs an embedding of its own with these rows,
            `source_vocab_size = len(rows)`; the decoder's ids are the original ones. For translations, the ids behind
            those of the vocabulary stand for `<unk>`.
    """

    lines: Comparison
    hard_strings: Comparison
    decoded: Comparison
    rows: list[int] | None = None

    @property
    def equal(self) -> bool:
        """No difference on any text."""
        return not (self.lines.different or self.hard_strings.different or self.decoded.different)


def convert_tokenizer(
    folder: Path,
    sources: Iterable[str] = (),
    targets: Iterable[str] = (),
    side: Literal["source", "target"] = "source",
    own_rows: bool = False,
) -> tuple[PreTrainedTokenizerFast, TokenizerReport]:
    """Convert the tokenizer of a MarianMT or FSMT checkpoint, and compare it with the original one.

    The tokenizer of `side="source"` encodes sources and decodes translations. A SentencePiece model segments one
    language, so translations of MarianMT are encoded, for training and forced decoding, by that of `side="target"`.

    Known differences from MarianTokenizer, which the comparison reports where the given texts have them: a language
    code `>>xx<<` is recognised inside a text too; an unknown code is plain text; combining marks that are not in
    canonical order are reordered. Special tokens in a text are plain text here; MarianTokenizer with
    `split_special_tokens=True` reads one as itself if source.spm has none of its characters. Where separate
    vocabularies give `<pad>` different ids, it drops a token of the translation that has the source's id.

    FSMTTokenizer applies Moses' rules before BPE, and these do not fit `tokenizers`: the converted tokenizer takes and
    returns text that is tokenised by Moses, with spaces between words.

    Args:
        folder (`Path`): The checkpoint: source.spm, target.spm, vocab.json; or merges.txt, vocab-src.json,
            vocab-tgt.json.
        sources (`Iterable[str]`), targets (`Iterable[str]`): Texts to compare both tokenizers on.
        side (`str`): The language to encode, "source" or "target".
        own_rows (`bool`): Accept a tokenizer whose ids are not those of the original. The caller must then build the
            encoder's embedding from `rows` of the report, or replace ids of a translation by them. Two kinds of
            checkpoints need it: those with separate vocabularies, and those whose segmentation yields pieces that are
            not in the vocabulary, which the original maps to `<unk>`.

    Returns:
        The tokenizer, and a `TokenizerReport`. The caller decides whether differences are acceptable.

    Raises:
        ValueError: The tokenizer cannot be converted. The message names the file, and what was found and expected.
        ImportError: SentencePiece or sacremoses is not installed.
    """
    convert = _convert_fsmt if (folder / "merges.txt").is_file() else _convert_marian
    return convert(folder, list(sources), list(targets), side, own_rows)


def from_sentencepiece(model: "SentencePieceModel", ids: dict[str, int], special: dict[str, str]) -> Tokenizer:
    """Build a Unigram tokenizer that segments like a SentencePiece model, and has other ids.

    MarianTokenizer looks up the strings of pieces. SentencePiece joins neighbouring characters that it does not know
    to one piece, whose string may be in the vocabulary as well. Spaces around such runs, which no piece has, keep
    pieces from matching a part of a run.

    Args:
        model (`SentencePieceModel`): Pieces with scores, and the normalisation.
        ids (`dict`): Id of each piece, 0, 1, ... without gaps. All pieces of the model must be among them.
        special (`dict`): `unk_token`, `eos_token` and others.
    """
    codes = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    names = {*special.values(), *codes}
    characters = {piece for piece in model.scores if len(piece) == 1}
    # Lower than any segmentation into pieces of the model: a piece of the other language never wins.
    lowest = min(0, *model.scores.values()) * (1 + max(map(len, ids))) - 1

    def entry(token: str) -> tuple[str, float]:
        is_run = token not in names and characters.isdisjoint(token)
        return (f" {token} ", lowest) if is_run else (token, model.scores.get(token, lowest))

    tokenizer = Tokenizer(Unigram([entry(token) for token in sorted(ids, key=ids.get)], ids[special["unk_token"]]))
    replace = normalizers.Replace
    tokenizer.normalizer = normalizers.Sequence(
        [
            *_character_map(model.character_map),
            replace(Regex(r"\A +"), ""),
            replace(Regex(" +"), WORD),
            normalizers.Prepend(WORD),
            replace(Regex(rf"{WORD}+\z"), ""),
            run_boundaries(characters),
            *(replace(name, f"{name[0]} {name[1:]}") for name in special.values() if characters.isdisjoint(name)),
        ]
    )
    if not any(WORD in piece[1:] for piece in model.scores):
        tokenizer.pre_tokenizer = pre_tokenizers.Split(WORD, "merged_with_next")  # words are cached
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(" ", ""),
            decoders.Replace(WORD, " "),
            decoders.Fuse(),
            decoders.Replace(Regex(r"\A\s+|\s+\z"), ""),
        ]
    )
    tokenizer.post_processor = _end_with(special["eos_token"], ids)
    tokenizer.add_tokens([AddedToken(code, normalized=False) for code in codes])
    return tokenizer


def from_bpe_codes(merges: list[tuple[str, str]], ids: dict[str, int], special: dict[str, str]) -> Tokenizer:
    """Build a tokenizer of fastBPE's codes, in which the last token of a word ends in `</w>`.

    It takes and returns words with spaces between them.

    Args:
        merges (`list`): Pairs of tokens, the most frequent one first.
        ids (`dict`): Id of each token. All tokens of `merges` must be among them.
        special (`dict`): `unk_token`, `eos_token` and others.
    """
    model = BPE(vocab=ids, merges=merges, unk_token=special["unk_token"], end_of_word_suffix=END_OF_WORD)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=END_OF_WORD)
    tokenizer.post_processor = _end_with(special["eos_token"], ids)
    return tokenizer


def read_codes(text: str, place: str) -> list[tuple[str, str]]:
    """Merges of BPE codes: those of fastBPE, a line `left right count`, or of subword-nmt, `left right`.

    Args:
        text (`str`): Content of the file.
        place (`str`): Name of the file, for messages.

    Raises:
        ValueError: A line is malformed, or the codes are of subword-nmt's first version, in which the end of a word
            is a token of its own.
    """
    lines = text.splitlines()
    first = 1 if lines and lines[0].startswith(VERSION) else 0
    merges = []
    for number, line in enumerate(lines[first:], start=first + 1):
        left, *rest = line.split(" ") if line.strip() else [""]
        if not (left and rest and rest[0]) or len(rest) > 2 or not all(count.isdigit() for count in rest[1:]):
            raise ValueError(f"{place}, line {number}: expected a pair of tokens and perhaps a count, found {line!r}.")
        if rest[0] == END_OF_WORD:
            raise ValueError(
                f"{place}, line {number}: found the token {END_OF_WORD!r}; expected codes of fastBPE, or of "
                f"subword-nmt's version 0.2, whose tokens end in it."
            )
        merges.append((left, rest[0]))
    return merges


class SentencePieceModel(NamedTuple):
    """Segmentation of a .spm file: the score of each piece, and the compiled table of characters."""

    scores: dict[str, float]
    character_map: bytes


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Read a .spm file.

    Raises:
        ValueError: The file is no SentencePiece model, or one with a feature that cannot be converted, which is named.
        ImportError: SentencePiece is not installed.
    """
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        raise ImportError(
            f"Reading {path} needs SentencePiece: pip install 'hf-vaswani[convert]' ({error})."
        ) from error
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path}: not a SentencePiece model: {error}.") from error
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    for present, feature in _unsupported(model, scores):
        if present:
            raise ValueError(f"{path}: a SentencePiece model with {feature} cannot be converted.")
    return SentencePieceModel(scores, model.normalizer_spec.precompiled_charsmap)


def _unsupported(model, scores: dict[str, float]) -> Iterator[tuple[bool, str]]:
    """Features that cannot be converted, and whether the model has them."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    yield trainer.model_type != trainer.UNIGRAM, f"type {trainer.ModelType.Name(trainer.model_type)}, not UNIGRAM,"
    yield trainer.byte_fallback, "byte fallback"
    yield trainer.treat_whitespace_as_suffix, "spaces at the end of words"
    yield not normalizer.add_dummy_prefix, "no dummy prefix"
    yield not normalizer.remove_extra_whitespaces, "spaces that are not collapsed"
    yield not normalizer.escape_whitespaces, f"spaces that are not written as {WORD}"
    mapped = bool(normalizer.precompiled_charsmap)
    yield (
        mapped and normalizer.name not in NFKC,
        f"normalisation {normalizer.name!r}, not {', '.join(NFKC)}, identity,",
    )
    yield bool(model.denormalizer_spec.precompiled_charsmap), "denormalisation"
    for piece in model.pieces:
        yield piece.type == piece.USER_DEFINED, f"a user-defined symbol, {piece.piece!r},"
    characters = {piece for piece in scores if len(piece) == 1}
    yield WORD not in characters, f"no piece {WORD}"
    for piece in scores:
        yield not characters.issuperset(piece), f"a piece, {piece!r}, of a character that is no piece,"


def _convert_marian(folder, sources, targets, side, own_rows):
    files = {name: folder / name for name in ("source.spm", "target.spm", "vocab.json")}
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and read_record(settings).get("separate_vocabs"):
        files["target_vocab.json"] = folder / "target_vocab.json"
    _check_files(files.values())
    model = read_sentencepiece(files[f"{side}.spm"])
    vocabularies = {path: _read_vocabulary(path) for path in files.values() if path.suffix == ".json"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Recommended: pip install sacremoses")  # it is never called
        try:
            original = MarianTokenizer.from_pretrained(folder)
        except KeyError as error:  # the unknown token
            raise ValueError(f"{files['vocab.json']}: {error.args[0]}.") from error
    special = {"unk_token": original.unk_token, "eos_token": original.eos_token, "pad_token": original.pad_token}
    _check_special(special, vocabularies)
    read, written = vocabularies[files["vocab.json"]], [*vocabularies.values()][-1]
    if side == "target":
        read = written
    ids, rows = _join_vocabularies(read, written, model.scores, original.unk_token)
    if rows is not None and not own_rows:
        raise ValueError(_reason(files[f"{side}.spm"], read, written, model.scores))
    tokenizer = _wrap(from_sentencepiece(model, ids, special), original, special)

    def encode(texts: list[str]) -> list[list[int]]:
        name = "text" if side == "source" else "text_target"
        return original(**{name: texts}, split_special_tokens=True)["input_ids"]

    spoken = original(text_target=targets, split_special_tokens=True)["input_ids"] if targets else []
    given = [*([token] for token in written.values()), *spoken]
    expected, found = (t.batch_decode(given, skip_special_tokens=True) for t in (original, tokenizer))
    return tokenizer, TokenizerReport(
        *_compare_ids(encode, tokenizer, sources if side == "source" else targets, rows),
        _compare("text of ids", given, expected, found),
        rows,
    )


def _convert_fsmt(folder, sources, targets, side, own_rows):
    files = {name: folder / name for name in ("merges.txt", "vocab-src.json", "vocab-tgt.json")}
    _check_files(files.values())
    try:
        original = FSMTTokenizer.from_pretrained(folder)
    except ImportError as error:
        raise ImportError(
            f"Reading {folder} needs sacremoses: pip install 'hf-vaswani[convert]' ({error})."
        ) from error
    if original.do_lower_case:
        raise ValueError(f"{folder}: a tokenizer with do_lower_case cannot be converted.")
    special = {"unk_token": original.unk_token, "eos_token": original.sep_token, "pad_token": original.pad_token}
    special["bos_token"] = original.bos_token
    vocabularies = {path: _read_vocabulary(path) for path in files.values() if path.suffix == ".json"}
    _check_special(special, vocabularies)
    read, written = vocabularies.values()
    if side == "target":
        read = written
    merges = [merge for merge in sorted(original.bpe_ranks, key=original.bpe_ranks.get) if merge[0] != VERSION]
    pieces = dict.fromkeys(token for left, right in merges for token in (left, right, left + right))
    ids, rows = _join_vocabularies(read, written, pieces, original.unk_token)
    if rows is not None and not own_rows:
        raise ValueError(_reason(files["merges.txt"], read, written, pieces))
    tokenizer = _wrap(from_bpe_codes(merges, ids, special), original, special)

    def encode(texts: list[str], vocabulary: dict[str, int] = read) -> list[list[int]]:
        unk, eos = vocabulary[original.unk_token], vocabulary[original.sep_token]
        tokens = [[token for word in text.split() for token in original.bpe(word).split()] for text in texts]
        return [[*(vocabulary.get(token, unk) for token in line), eos] for line in tokens]

    every = sorted(written.values())
    spoken = [*(every[i : i + 50] for i in range(0, len(every), 50)), *encode(targets, written)]
    expected = original.batch_decode(spoken, skip_special_tokens=True)
    words = [text.split() for text in tokenizer.batch_decode(spoken, skip_special_tokens=True)]
    return tokenizer, TokenizerReport(
        *_compare_ids(encode, tokenizer, sources if side == "source" else targets, rows),
        _compare("text of ids", spoken, expected, [original.moses_detokenize(w, original.tgt_lang) for w in words]),
        rows,
    )


def _check_files(paths: Iterable[Path]) -> None:
    paths = list(paths)
    if missing := [path for path in paths if not path.is_file()]:
        raise ValueError(f"{missing[0]}: no such file; expected {', '.join(path.name for path in paths)}.")


def _check_special(special: dict[str, str], vocabularies: dict[Path, dict[str, int]]) -> None:
    for path, ids in vocabularies.items():
        for name, token in special.items():
            if token not in ids:
                raise ValueError(f"{path}: expected the {name} {token!r}, found none.")


def _read_vocabulary(path: Path) -> dict[str, int]:
    """Read the ids of a vocabulary; these must be 0, 1, 2, ..., one a token."""
    ids = read_record(path)
    by_id = {number: token for token, number in ids.items() if type(number) is int}
    missing = next((number for number in range(len(ids)) if number not in by_id), None)
    if missing is not None:
        raise ValueError(f"{path}: expected the ids 0 to {len(ids) - 1}, found no token with id {missing}.")
    return ids


def _join_vocabularies(
    read: dict[str, int], written: dict[str, int], pieces: Iterable[str], unk_token: str
) -> tuple[dict[str, int], list[int] | None]:
    """Give ids to all tokens that are read or written, and to pieces without an id.

    Tokens that are written keep their ids, and the others have higher ones.

    Returns:
        The ids; and for each, the row of the encoder's embedding, or `None` where that is the id.
    """
    ids = dict(written)
    for token in (*read, *pieces):
        ids.setdefault(token, len(ids))
    rows = [read.get(token, read[unk_token]) for token in sorted(ids, key=ids.get)]
    return ids, None if rows == list(range(len(written))) else rows


def _reason(path: Path, read: dict[str, int], written: dict[str, int], pieces: Iterable[str]) -> str:
    unknown = [piece for piece in pieces if piece not in read]
    if not unknown:
        sizes = f"{len(read):,} and {len(written):,} tokens"
        return f"{path.parent}: expected one vocabulary for both languages, found two that differ, of {sizes}."
    return f"{path}: expected pieces of the vocabulary, found {len(unknown):,} that it lacks, such as {unknown[0]!r}."


def _end_with(token: str, ids: dict[str, int]) -> processors.PostProcessor:
    return processors.TemplateProcessing(single=f"$A {token}", special_tokens=[(token, ids[token])])


def _wrap(tokenizer: Tokenizer, original: PreTrainedTokenizerBase, special: dict[str, str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, model_max_length=original.model_max_length, **SETTINGS
    )


def with_target_side(
    source: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast, rows: list[int] | None
) -> TwoSidedTokenizer:
    """Join the tokenizers of both sides.

    Args:
        source, target (`PreTrainedTokenizerFast`): From `convert_tokenizer`.
        rows (`list[int]`, *optional*): Those of the target's report.
    """
    size = next((token for token, row in enumerate(rows or []) if token != row), len(target))
    return TwoSidedTokenizer(source, target.backend_tokenizer, size)


def _character_map(compiled: bytes) -> list[normalizers.Normalizer]:
    """SentencePiece's table of characters, one of those derived from NFKC.

    SentencePiece replaces the longest match at each place. `Precompiled` looks at whole graphemes: it replaces a short
    one by the shortest match in it, which drops further accents, and composes nothing in a longer one. Therefore each
    mark becomes a grapheme of its own, so that `Precompiled` sees single characters, and NFC composes them afterwards.
    """
    if not compiled:
        return []
    extends = r"\p{M}\x{200C}\x{200D}\x{FF9E}\x{FF9F}\x{1F3FB}-\x{1F3FF}"
    return [
        normalizers.Replace(Regex(rf"(?m)(?<=.)(?=[{extends}])"), BREAK),  # never at the start, where replacing panics
        normalizers.Precompiled(compiled),
        normalizers.Replace(BREAK, ""),
        normalizers.NFC(),
    ]


def _compare(what: str, given: list, expected: list, found: list) -> Comparison:
    different = [Difference(*row) for row in zip(given, expected, found) if row[1] != row[2]]
    return Comparison(what, len(given), len(different), different[0] if different else None)


def _compare_ids(
    encode: Callable[[list[str]], list[list[int]]],
    tokenizer: PreTrainedTokenizerFast,
    texts: list[str],
    rows: list[int] | None,
) -> Iterator[Comparison]:
    for what, given in (("ids of the given texts", texts), ("ids of hard strings", HARD_STRINGS)):
        found = tokenizer(given)["input_ids"] if given else []
        if rows is not None:
            found = [[rows[token] for token in line] for line in found]
        yield _compare(what, given, encode(given) if given else [], found)
