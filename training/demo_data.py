"""Generate English-German sentence pairs from a small grammar, for the demo and the tests.

German word order and agreement exercise attention and positions. The verb is second in a main clause and last in a
subordinate clause. A perfect, a modal verb or a separable prefix splits it around the objects. The subject follows the
verb after an adverb. Articles and adjectives agree with their noun in gender, case and number, which English does not
mark. The grammar yields far more sentences than are ever generated, and the splits share none, so the model has not
seen the test sentences. The grammar also knows the gold alignment of the words.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

from .files import check_output, check_output_folder, write_whole
from .options import Parser
from .running import run


@dataclass(frozen=True)
class Noun:
    """English noun and its plural; gender (m, f, n), noun and plural in German."""

    english: str
    english_plural: str
    gender: str
    german: str
    german_plural: str

    def in_german(self, case: str, plural: bool) -> str:
        if not plural:
            return self.german
        ends_bare = case != "dative" or self.german_plural[-1] in "ns"
        return self.german_plural if ends_bare else self.german_plural + "n"


@dataclass(frozen=True)
class Verb:
    """Forms of a verb: base, third person and participle in English; third person, plural, infinitive, participle and
    separable prefix in German.
    """

    base: str
    third: str
    participle: str
    german_third: str
    german_plural: str
    german_infinitive: str
    german_participle: str
    prefix: str = ""


PEOPLE = [
    Noun("man", "men", "m", "Mann", "Männer"),
    Noun("woman", "women", "f", "Frau", "Frauen"),
    Noun("child", "children", "n", "Kind", "Kinder"),
    Noun("teacher", "teachers", "m", "Lehrer", "Lehrer"),
    Noun("friend", "friends", "m", "Freund", "Freunde"),
    Noun("king", "kings", "m", "König", "Könige"),
    Noun("queen", "queens", "f", "Königin", "Königinnen"),
    Noun("girl", "girls", "n", "Mädchen", "Mädchen"),
    Noun("daughter", "daughters", "f", "Tochter", "Töchter"),
    Noun("dog", "dogs", "m", "Hund", "Hunde"),
    Noun("cat", "cats", "f", "Katze", "Katzen"),
    Noun("horse", "horses", "n", "Pferd", "Pferde"),
]
THINGS = [
    Noun("apple", "apples", "m", "Apfel", "Äpfel"),
    Noun("book", "books", "n", "Buch", "Bücher"),
    Noun("flower", "flowers", "f", "Blume", "Blumen"),
    Noun("letter", "letters", "m", "Brief", "Briefe"),
    Noun("picture", "pictures", "n", "Bild", "Bilder"),
    Noun("bag", "bags", "f", "Tasche", "Taschen"),
    Noun("ball", "balls", "m", "Ball", "Bälle"),
    Noun("house", "houses", "n", "Haus", "Häuser"),
    Noun("lamp", "lamps", "f", "Lampe", "Lampen"),
    Noun("chair", "chairs", "m", "Stuhl", "Stühle"),
]
TRANSITIVE = [
    Verb("see", "sees", "seen", "sieht", "sehen", "sehen", "gesehen"),
    Verb("love", "loves", "loved", "liebt", "lieben", "lieben", "geliebt"),
    Verb("find", "finds", "found", "findet", "finden", "finden", "gefunden"),
    Verb("paint", "paints", "painted", "malt", "malen", "malen", "gemalt"),
    Verb("carry", "carries", "carried", "trägt", "tragen", "tragen", "getragen"),
    Verb("look for", "looks for", "looked for", "sucht", "suchen", "suchen", "gesucht"),
    Verb("pick up", "picks up", "picked up", "holt", "holen", "abholen", "abgeholt", "ab"),
    Verb("look at", "looks at", "looked at", "schaut", "schauen", "anschauen", "angeschaut", "an"),
]
DITRANSITIVE = [
    Verb("give", "gives", "given", "gibt", "geben", "geben", "gegeben"),
    Verb("show", "shows", "shown", "zeigt", "zeigen", "zeigen", "gezeigt"),
    Verb("bring", "brings", "brought", "bringt", "bringen", "bringen", "gebracht"),
    Verb("sell", "sells", "sold", "verkauft", "verkaufen", "verkaufen", "verkauft"),
    Verb("send", "sends", "sent", "schickt", "schicken", "schicken", "geschickt"),
]
MODALS = [
    ("can", "can", "kann", "können"),
    ("must", "must", "muss", "müssen"),
    ("wants to", "want to", "will", "wollen"),
]
ADJECTIVES = [
    ("old", "alt"),
    ("small", "klein"),
    ("young", "jung"),
    ("new", "neu"),
    ("big", "groß"),
    ("good", "gut"),
    ("beautiful", "schön"),
    ("quiet", "ruhig"),
]
ADVERBS = [("today", "heute"), ("often", "oft"), ("now", "jetzt"), ("in the evening", "am Abend")]
CONJUNCTIONS = [("because", "weil"), ("although", "obwohl"), ("while", "während")]

# German endings by case, in the order masculine, feminine, neuter, plural.
ARTICLES = {
    "nominative": ("der", "die", "das", "die"),
    "accusative": ("den", "die", "das", "die"),
    "dative": ("dem", "der", "dem", "den"),
}
STRONG = {
    "nominative": ("er", "e", "es", "e"),
    "accusative": ("en", "e", "es", "e"),
    "dative": ("em", "er", "em", "en"),
}
MIXED = {"nominative": ("", "e", "", "e"), "accusative": ("en", "e", "", "e"), "dative": ("em", "er", "em", "en")}
ADJECTIVE_WEAK = {
    "nominative": ("e", "e", "e", "en"),
    "accusative": ("en", "e", "e", "en"),
    "dative": ("en", "en", "en", "en"),
}
ADJECTIVE_MIXED = {
    "nominative": ("er", "e", "es", "en"),
    "accusative": ("en", "e", "es", "en"),
    "dative": ("en", "en", "en", "en"),
}


@dataclass(frozen=True)
class Word:
    """Word of a sentence with what it stands for, from which the gold alignment follows.

    Attributes:
        text (`str`): Word.
        sure (`tuple[str, ...]`): Meanings that the word expresses. An English word has one.
        possible (`tuple[str, ...]`): Meanings that a German word takes part in: "sieht" in that of "does" in "does not
            see".
    """

    text: str
    sure: tuple[str, ...]
    possible: tuple[str, ...] = ()


def join(words: list[Word]) -> str:
    return " ".join(word.text for word in words)


@dataclass(frozen=True)
class NounPhrase:
    """Determiner ("the", "this", "a" or "my"), optional adjective (English and German) and noun."""

    determiner: str
    adjective: tuple[str, str] | None
    noun: Noun
    plural: bool

    def in_english(self, role: str) -> list[Word]:
        determiner = "these" if self.determiner == "this" and self.plural else self.determiner
        noun = self.noun.english_plural if self.plural else self.noun.english
        following = self.adjective[0] if self.adjective else noun
        if determiner == "a" and following[0] in "aeiou":
            determiner = "an"
        adjective = [Word(self.adjective[0], (f"{role} adjective",))] if self.adjective else []
        return [Word(determiner, (f"{role} determiner",)), *adjective, Word(noun, (role,))]

    def in_german(self, case: str, role: str) -> list[Word]:
        column = 3 if self.plural else "mfn".index(self.noun.gender)
        determiner = {
            "the": ARTICLES[case][column],
            "this": "dies" + STRONG[case][column],
            "a": "ein" + MIXED[case][column],
            "my": "mein" + MIXED[case][column],
        }[self.determiner]
        endings = ADJECTIVE_WEAK if self.determiner in ("the", "this") else ADJECTIVE_MIXED
        adjective = []
        if self.adjective:
            adjective = [Word(self.adjective[1] + endings[case][column], (f"{role} adjective",))]
        # The dative also says what "to" says in English.
        first = Word(determiner, (f"{role} determiner",), (f"to {role}",))
        return [first, *adjective, Word(self.noun.in_german(case, self.plural), (role,))]


@dataclass(frozen=True)
class Clause:
    """Clause of subject, verb and objects, in the present, in the perfect or with a modal verb."""

    subject: NounPhrase
    verb: Verb
    accusative: NounPhrase
    dative: NounPhrase | None
    dative_first: bool  # English only: "gives the child a book", not "gives a book to the child"
    tense: str  # "present", "perfect" or "modal"
    modal: tuple[str, str, str, str] | None
    negated: bool

    def in_english(self) -> list[Word]:
        plural = self.subject.plural
        negation = [Word("not", ("not",))] if self.negated else []
        if self.tense == "perfect":
            verb = [
                Word("have" if plural else "has", ("finite",)),
                *negation,
                *self._english_verb(self.verb.participle),
            ]
        elif self.tense == "modal":
            modal, *to = (self.modal[1] if plural else self.modal[0]).split()
            verb = [
                Word(modal, ("finite",)),
                *[Word(word, ("to verb",)) for word in to],
                *self._english_verb(self.verb.base),
            ]
        elif self.negated:
            verb = [Word("do" if plural else "does", ("do",)), *negation, *self._english_verb(self.verb.base)]
        else:
            verb = self._english_verb(self.verb.base if plural else self.verb.third)
        return [*self.subject.in_english("subject"), *verb, *self._english_objects()]

    def _english_verb(self, form: str) -> list[Word]:
        verb, *particle = form.split()
        return [Word(verb, ("verb",)), *[Word(word, ("particle",)) for word in particle]]

    def _english_objects(self) -> list[Word]:
        accusative = self.accusative.in_english("accusative")
        if self.dative is None:
            return accusative
        dative = self.dative.in_english("dative")
        if self.dative_first:
            return [*dative, *accusative]
        return [*accusative, Word("to", ("to dative",)), *dative]

    def in_german(self, adverb: str = "", subordinate: bool = False) -> list[Word]:
        """Inflect the clause. The verb is last if `subordinate`; otherwise second, after `adverb` or the subject."""
        finite, tail = self._german_verb(subordinate)
        subject = self.subject.in_german("nominative", "subject")
        dative = self.dative.in_german("dative", "dative") if self.dative else []
        negation = [Word("nicht", ("not",))] if self.negated else []
        objects = [*dative, *self.accusative.in_german("accusative", "accusative"), *negation]
        if subordinate:
            return [*subject, *objects, *tail, finite]
        start = [*adverb_words(adverb), finite, *subject] if adverb else [*subject, finite]
        return [*start, *objects, *tail]

    def _german_verb(self, subordinate: bool) -> tuple[Word, list[Word]]:
        """Finite verb, and the participle, infinitive or prefix at the end of the clause."""
        plural = self.subject.plural
        whole, part = ("verb", "particle") if self.verb.prefix else ("verb",), ("particle",)
        if self.tense == "perfect":
            return Word("haben" if plural else "hat", ("finite",)), [Word(self.verb.german_participle, whole, part)]
        if self.tense == "modal":
            infinitive = Word(self.verb.german_infinitive, whole, (*part, "to verb"))
            return Word(self.modal[3] if plural else self.modal[2], ("finite",), ("to verb",)), [infinitive]
        finite = self.verb.german_plural if plural else self.verb.german_third
        if subordinate:
            return Word(self.verb.prefix + finite, whole, (*part, "do")), []
        prefix = [Word(self.verb.prefix, ("particle",), ("verb",))] if self.verb.prefix else []
        return Word(finite, ("verb",), (*part, "do")), prefix


def adverb_words(adverb: str) -> list[Word]:
    """Words of an adverb. The last one is its head: "in the evening" is "am Abend"."""
    words = adverb.split()
    return [Word(word, ("adverb" if word is words[-1] else "adverb's",)) for word in words]


def random_noun_phrase(rng: random.Random, nouns: list[Noun]) -> NounPhrase:
    plural = rng.random() < 0.35
    determiner = rng.choice(["the", "the", "this", "my"] if plural else ["the", "the", "this", "a", "my"])
    adjective = rng.choice(ADJECTIVES) if rng.random() < 0.4 else None
    return NounPhrase(determiner, adjective, rng.choice(nouns), plural)


def random_clause(rng: random.Random) -> Clause:
    ditransitive = rng.random() < 0.35
    tense = rng.choice(["present", "present", "perfect", "modal"])
    return Clause(
        subject=random_noun_phrase(rng, PEOPLE),
        verb=rng.choice(DITRANSITIVE if ditransitive else TRANSITIVE),
        accusative=random_noun_phrase(rng, THINGS if ditransitive else PEOPLE + THINGS),
        dative=random_noun_phrase(rng, PEOPLE) if ditransitive else None,
        dative_first=rng.random() < 0.5,
        tense=tense,
        modal=rng.choice(MODALS) if tense == "modal" else None,
        negated=tense != "modal" and rng.random() < 0.2,
    )


def links_between(english: list[Word], german: list[Word]) -> Iterator[tuple[int, int, bool]]:
    """Yield the links of an English and a German word, counted from 0, and whether they are sure."""
    for (i, word), (j, other) in product(enumerate(english), enumerate(german)):
        [meaning] = word.sure
        if meaning in other.sure or meaning in other.possible:
            yield i, j, meaning in other.sure


def random_parts(rng: random.Random) -> Iterator[tuple[list[Word], list[Word]]]:
    """Generate the parts of a sentence in English and German: a clause, perhaps a conjunction and a second clause."""
    clause = random_clause(rng)
    adverb, german_adverb = rng.choice(ADVERBS) if rng.random() < 0.3 else ("", "")
    yield [*adverb_words(adverb), *clause.in_english()], clause.in_german(german_adverb)
    if rng.random() < 0.35:
        conjunction, german_conjunction = rng.choice(CONJUNCTIONS)
        yield [Word(conjunction, ("conjunction",))], [Word(german_conjunction, ("conjunction",))]
        second_clause = random_clause(rng)
        yield second_clause.in_english(), second_clause.in_german(subordinate=True)


def random_pair(rng: random.Random) -> tuple[str, str, str]:
    """Generate an English sentence, its German translation, and their gold alignment.

    The alignment is in the form `0-0 1-2 2?1`: a sure link has a hyphen, a possible link a question mark. Words are
    those of `text.split()`, counted from 0.
    """
    english, german, links = [], [], []
    for part, german_part in random_parts(rng):
        for i, j, sure in links_between(part, german_part):
            links.append(f"{len(english) + i}{'-' if sure else '?'}{len(german) + j}")
        english += part
        german += german_part
    first, second = join(english), join(german)
    for _, conjunction in CONJUNCTIONS:
        second = second.replace(f" {conjunction} ", f", {conjunction} ")
    return first[0].upper() + first[1:] + ".", second[0].upper() + second[1:] + ".", " ".join(links)


def generate_aligned_pairs(count: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """Generate `count` pairs with distinct English sentences and their gold alignment, reproducibly for a seed."""
    rng = random.Random(seed)
    pairs: dict[str, tuple[str, str]] = {}
    while len(pairs) < count:
        english, german, links = random_pair(rng)
        pairs.setdefault(english, (german, links))
    return [(english, german, links) for english, (german, links) in pairs.items()]


def generate_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Generate `count` pairs with distinct English sentences, reproducibly for a seed."""
    return [(english, german) for english, german, _ in generate_aligned_pairs(count, seed)]


def write_demo_data(
    folder: str, train: int = 20_000, val: int = 500, test: int = 500, seed: int = 0
) -> dict[str, list[Path]]:
    """Write `train`, `val` and `test` as parallel text files that share no English sentence.

    The gold alignment of each split is in a third file, which ends in `.align`.

    Returns:
        `{split: [English file, German file]}`.

    Raises:
        OSError: One of the files cannot be written; see `check_output`.
    """
    check_output_folder(folder, "folder")
    files = {
        split: [Path(folder) / f"{split}.{kind}" for kind in ("en", "de", "align")]
        for split in ("test", "val", "train")
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in chain.from_iterable(files.values()):
        check_output(path, option="folder")
    pairs = generate_aligned_pairs(train + val + test, seed)
    start = 0
    for split, count in (("test", test), ("val", val), ("train", train)):
        for side, path in enumerate(files[split]):
            write_whole(path, "".join(pair[side] + "\n" for pair in pairs[start : start + count]))
        start += count
    return {split: paths[:2] for split, paths in files.items()}


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani demo-data`."""
    parser = Parser(prog="hf-vaswani demo-data", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="folder for the .en, .de and .align files of train, val and test")
    parser.add_argument("--train", type=int, default=20_000, help="training pairs (%(default)s)")
    parser.add_argument("--val", type=int, default=500, help="validation pairs (%(default)s)")
    parser.add_argument("--test", type=int, default=500, help="test pairs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani demo-data`."""
    args = make_parser().parse_args(argv)
    for split, paths in write_demo_data(args.folder, args.train, args.val, args.test, args.seed).items():
        print(f"{split}: {', '.join(map(str, [*paths, paths[0].with_suffix('.align')]))}")


if __name__ == "__main__":
    sys.exit(run("demo-data"))
