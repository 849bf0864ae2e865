"""Part-of-speech tags that words have in files of trees, to restrict the search of a parser."""

from collections import Counter, defaultdict

from .treebanks import read_treebank


KNOWN = 5  # occurrences after which a word is taken to have no other tags


class TagLexicon:
    """Tags of words in files of trees.

    A word that occurs fewer than `KNOWN` times may also have each tag of at least `KNOWN` words that occur once: those
    of nouns, names, numbers and the like.

    Args:
        files (`list[str]`): Files that end in `.trees` or `.trees.gz`.

    Raises:
        DataError: A tree is malformed, or a file has none.
        OSError: A file cannot be read.
    """

    def __init__(self, files: list[str]):
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        for file in files:
            for _, tree in read_treebank(file):
                for word, tag in zip(tree.words(), tree.tags()):
                    self.counts[word][tag] += 1
        once = Counter(tag for tags in self.counts.values() if tags.total() == 1 for tag in tags)
        self.of_rare_words = {tag for tag, count in once.items() if count >= KNOWN}

    def tags(self, word: str) -> set[str]:
        """Tags that a word may have; none if nothing is known of words like it."""
        counts = self.counts.get(word, Counter())
        return set(counts) if counts.total() >= KNOWN else self.of_rare_words | set(counts)
