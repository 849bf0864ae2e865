"""Generate English-German sentence pairs from a small grammar, for the demo and the tests.

German word order and agreement exercise attention and positions. The verb is second in a main clause and last in a
subordinate clause. A perfect, a modal verb or a separable prefix splits it around the objects. The subject follows the
verb after an adverb. Articles and adjectives agree with their noun in gender, case and number, which English does not
mark. The grammar yields far more sentences than are ever generated, and the splits share none, so the model has not
seen the test sentences.
"""

import argparse
import random
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from .files import check_output, check_output_folder, write_whole


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
class NounPhrase:
    """Determiner ("the", "this", "a" or "my"), optional adjective (English and German) and noun."""

    determiner: str
    adjective: tuple[str, str] | None
    noun: Noun
    plural: bool

    def in_english(self) -> str:
        determiner = "these" if self.determiner == "this" and self.plural else self.determiner
        noun = self.noun.english_plural if self.plural else self.noun.english
        words = [determiner, *([self.adjective[0]] if self.adjective else []), noun]
        if determiner == "a" and words[1][0] in "aeiou":
            words[0] = "an"
        return " ".join(words)

    def in_german(self, case: str) -> str:
        column = 3 if self.plural else "mfn".index(self.noun.gender)
        determiner = {
            "the": ARTICLES[case][column],
            "this": "dies" + STRONG[case][column],
            "a": "ein" + MIXED[case][column],
            "my": "mein" + MIXED[case][column],
        }[self.determiner]
        endings = ADJECTIVE_WEAK if self.determiner in ("the", "this") else ADJECTIVE_MIXED
        adjective = [self.adjective[1] + endings[case][column]] if self.adjective else []
        return " ".join([determiner, *adjective, self.noun.in_german(case, self.plural)])


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

    def in_english(self) -> str:
        plural = self.subject.plural
        negation = ["not"] if self.negated else []
        if self.tense == "perfect":
            verb = ["have" if plural else "has", *negation, self.verb.participle]
        elif self.tense == "modal":
            verb = [self.modal[1] if plural else self.modal[0], self.verb.base]
        elif self.negated:
            verb = ["do" if plural else "does", "not", self.verb.base]
        else:
            verb = [self.verb.base if plural else self.verb.third]
        return " ".join([self.subject.in_english(), *verb, *self._english_objects()])

    def _english_objects(self) -> list[str]:
        accusative = self.accusative.in_english()
        if self.dative is None:
            return [accusative]
        if self.dative_first:
            return [self.dative.in_english(), accusative]
        return [accusative, "to", self.dative.in_english()]

    def in_german(self, adverb: str = "", subordinate: bool = False) -> str:
        """Inflect the clause. The verb is last if `subordinate`; otherwise second, after `adverb` or the subject."""
        finite, tail = self._german_verb(subordinate)
        subject = self.subject.in_german("nominative")
        dative = [self.dative.in_german("dative")] if self.dative else []
        objects = [*dative, self.accusative.in_german("accusative"), *(["nicht"] if self.negated else [])]
        if subordinate:
            return " ".join([subject, *objects, *tail, finite])
        start = [adverb, finite, subject] if adverb else [subject, finite]
        return " ".join([*start, *objects, *tail])

    def _german_verb(self, subordinate: bool) -> tuple[str, list[str]]:
        """Finite verb, and the participle, infinitive or prefix at the end of the clause."""
        plural = self.subject.plural
        if self.tense == "perfect":
            return ("haben" if plural else "hat"), [self.verb.german_participle]
        if self.tense == "modal":
            return (self.modal[3] if plural else self.modal[2]), [self.verb.german_infinitive]
        finite = self.verb.german_plural if plural else self.verb.german_third
        if subordinate:
            return self.verb.prefix + finite, []
        return finite, [self.verb.prefix] if self.verb.prefix else []


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


def random_pair(rng: random.Random) -> tuple[str, str]:
    """Generate an English sentence and its German translation."""
    clause = random_clause(rng)
    english, german = clause.in_english(), clause.in_german()
    if rng.random() < 0.3:
        adverb, german_adverb = rng.choice(ADVERBS)
        english, german = f"{adverb} {english}", clause.in_german(german_adverb)
    if rng.random() < 0.35:
        conjunction, german_conjunction = rng.choice(CONJUNCTIONS)
        second_clause = random_clause(rng)
        english = f"{english} {conjunction} {second_clause.in_english()}"
        german = f"{german}, {german_conjunction} {second_clause.in_german(subordinate=True)}"
    return english[0].upper() + english[1:] + ".", german[0].upper() + german[1:] + "."


def generate_pairs(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Generate `count` pairs with distinct English sentences, reproducibly for a seed."""
    rng = random.Random(seed)
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        english, german = random_pair(rng)
        pairs.setdefault(english, german)
    return list(pairs.items())


def write_demo_data(
    folder: str, train: int = 20_000, val: int = 500, test: int = 500, seed: int = 0
) -> dict[str, list[Path]]:
    """Write `train`, `val` and `test` as parallel text files that share no English sentence.

    Returns:
        `{split: [English file, German file]}`.

    Raises:
        OSError: One of the files cannot be written; see `check_output`.
    """
    check_output_folder(folder, "folder")
    files = {split: [Path(folder) / f"{split}.{lang}" for lang in ("en", "de")] for split in ("test", "val", "train")}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for path in chain.from_iterable(files.values()):
        check_output(path, option="folder")
    pairs = generate_pairs(train + val + test, seed)
    start = 0
    for split, count in (("test", test), ("val", val), ("train", train)):
        for side, path in enumerate(files[split]):
            write_whole(path, "".join(pair[side] + "\n" for pair in pairs[start : start + count]))
        start += count
    return files


def make_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `hf-vaswani demo-data`."""
    parser = argparse.ArgumentParser(prog="hf-vaswani demo-data", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="folder for the .en and .de files of train, val and test")
    parser.add_argument("--train", type=int, default=20_000, help="training pairs (%(default)s)")
    parser.add_argument("--val", type=int, default=500, help="validation pairs (%(default)s)")
    parser.add_argument("--test", type=int, default=500, help="test pairs (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    return parser


def main(argv: list[str] | None = None) -> None:
    """`hf-vaswani demo-data`."""
    args = make_parser().parse_args(argv)
    for split, paths in write_demo_data(args.folder, args.train, args.val, args.test, args.seed).items():
        print(f"{split}: {paths[0]}, {paths[1]}")


if __name__ == "__main__":
    main()
