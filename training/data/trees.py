"""Phrase structure trees in the brackets of the Penn Treebank, and their linearisation (section 6.3 of the paper).

A linearised tree (Vinyals et al. 2015) has one symbol per bracket and word: `(NP` opens a phrase, `)NP` closes it, and
the part-of-speech tag, or `XX`, stands for a word, which is not written.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal


TOP = "TOP"  # label of a root that the tree lacks; not scored
UNKNOWN_TAG = "XX"
EMPTY_TAG = "-NONE-"  # tag of a trace, which is not a word

_PIECE = re.compile(r"[()]|[^\s()]+")
_SYMBOL = re.compile(r"([()]?)([^\s()]+)")


class TreeError(ValueError):
    """Malformed tree.

    Args:
        line, column (`int`): Position of the error, counted from 1.
        reason (`str`): What was found, for people.
    """

    def __init__(self, line: int, column: int, reason: str):
        super().__init__(f"line {line}, column {column}: {reason}")
        self.line, self.column, self.reason = line, column, reason


@dataclass(eq=False, repr=False)
class Tree:
    """A phrase, whose children are trees, or a tag, whose only child is a word.

    No method recurses, so trees may be deeper than Python's recursion limit.

    Args:
        label (`str`): Label of the phrase or tag of the word.
        children (`list[Tree]` or `list[str]`): Phrases and tags, at least one; or exactly one word.

    >>> tree = parse_tree("(S (NP (DT The) (NN dog)) (VP (VBZ barks)))")
    >>> tree.words(), tree.tags()
    (['The', 'dog', 'barks'], ['DT', 'NN', 'VBZ'])
    >>> tree.spans()
    [('S', 0, 3), ('NP', 0, 2), ('VP', 2, 3)]
    """

    label: str
    children: "list[Tree] | list[str]"

    @property
    def is_tag(self) -> bool:
        """Whether this is the tag of a word."""
        return isinstance(self.children[0], str)

    def walk(self) -> Iterator[tuple[str, "Tree"]]:
        """Yield `("(", phrase)` and `(")", phrase)` around the children of a phrase, and `("", tag)`, depth first."""
        stack = [("", self)]
        while stack:
            event, tree = stack.pop()
            if event or tree.is_tag:
                yield event, tree
                continue
            yield "(", tree
            stack.append((")", tree))
            stack += [("", child) for child in reversed(tree.children)]

    def words(self) -> list[str]:
        """Words, from left to right."""
        return [tree.children[0] for event, tree in self.walk() if not event]

    def tags(self) -> list[str]:
        """Part-of-speech tags of the words."""
        return [tree.label for event, tree in self.walk() if not event]

    def spans(self) -> list[tuple[str, int, int]]:
        """Label, first word and word behind the last of each phrase, depth first. Tags are not phrases."""
        spans: list[tuple[str, int, int]] = []
        opened, position = [], 0
        for event, tree in self.walk():
            if event == "(":
                opened.append(len(spans))
                spans.append((tree.label, position, position))
            elif event == ")":
                index = opened.pop()
                spans[index] = (*spans[index][:2], position)
            else:
                position += 1
        return spans

    def __str__(self) -> str:
        pieces = []
        for event, tree in self.walk():
            if event == ")":
                pieces.append(")")
            else:
                pieces.append(f" ({tree.label}" if event else f" ({tree.label} {tree.children[0]})")
        return "".join(pieces)[1:]

    def __repr__(self) -> str:
        return f"<Tree {self}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tree) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


def parse_tree(text: str) -> Tree:
    """Parse one bracketed tree; white space, also line ends, separates labels and words. Escapes such as `-LRB-` stay.

    An outer bracket without a label, as in the Penn Treebank, is left out; one around several trees is labelled `TOP`.

    Raises:
        TreeError: There is not exactly one well-formed tree.
    """
    trees = [tree for _, tree in _parse([text])]
    if not trees:
        raise TreeError(1, 1, "expected a tree, found nothing.")
    return trees[0]


def read_trees(lines: Iterable[str]) -> Iterator[tuple[int, Tree]]:
    """Yield the trees of a file, each with the number of its first line, counted from 1.

    A tree stands on one line, or on several if all but the first are indented. So a missing bracket does not spoil the
    trees that follow. Blank lines separate nothing.

    Raises:
        TreeError: A tree is malformed.
    """
    yield from _parse(lines)


@dataclass
class _Bracket:
    """An open bracket: its position, its label ("" for none, `None` if unknown yet), and what it holds."""

    line: int
    column: int
    label: str | None
    children: list

    def closed(self, is_outermost: bool) -> Tree:
        """The tree that this bracket holds, without an outermost bracket that has no label."""
        if not self.children:
            found = f"({self.label or ''})"
            raise TreeError(self.line, self.column, f"expected a label with phrases or a word, found {found!r}.")
        words = [child for child in self.children if isinstance(child, str)]
        if words and len(self.children) > 1:
            found = f"{words[0]!r} and {len(self.children) - 1} more"
            raise TreeError(self.line, self.column, f"expected one word or phrases in {self.label!r}, found {found}.")
        if self.label:
            return Tree(self.label, self.children)
        if not is_outermost:
            raise TreeError(self.line, self.column, "expected a label behind the opening bracket, found a bracket.")
        return self.children[0] if len(self.children) == 1 else Tree(TOP, self.children)


def _parse(lines: Iterable[str]) -> Iterator[tuple[int, Tree]]:
    """Yield the trees of `lines`, each with the number of its first line; see `read_trees`."""
    stack: list[_Bracket] = []
    for number, line in enumerate(lines, start=1):
        finished = None
        if stack and line.startswith("("):
            raise TreeError(number, 1, f"a tree begins, but {_unclosed(stack)}; further lines of a tree are indented.")
        for match in _PIECE.finditer(line):
            piece, column = match[0], match.start() + 1
            if finished is not None:
                raise TreeError(number, column, f"expected nothing behind the tree, found {piece!r}.")
            if not stack and piece != "(":
                raise TreeError(number, column, f"expected an opening bracket, found {piece!r}.")
            if piece == ")":
                bracket = stack.pop()
                tree = bracket.closed(is_outermost=not stack)
                if stack:
                    stack[-1].children.append(tree)
                else:
                    finished = bracket.line, tree
            elif piece == "(":
                if stack and stack[-1].label is None:
                    stack[-1].label = ""
                stack.append(_Bracket(number, column, None, []))
            elif stack[-1].label is None:
                stack[-1].label = piece
            else:
                stack[-1].children.append(piece)
        if finished is not None:
            yield finished
    if stack:
        raise TreeError(stack[0].line, stack[0].column, f"the text ends, but {_unclosed(stack)}.")


def _unclosed(stack: list[_Bracket]) -> str:
    missing = f"{len(stack)} bracket{'s are' if len(stack) > 1 else ' is'} missing"
    return f"the tree of line {stack[0].line} is not closed ({missing})"


def tree_words(text: str) -> list[str]:
    """Words of a sentence, separated by white space, as a tree holds them: with `-LRB-` and `-RRB-` for brackets.

    >>> tree_words("of TNF  (alpha)")
    ['of', 'TNF', '-LRB-alpha-RRB-']
    """
    return text.replace("(", "-LRB-").replace(")", "-RRB-").split()


def without_traces(tree: Tree) -> tuple[Tree | None, int]:
    """Copy of a tree without traces (tag `-NONE-`) and without the phrases that hold nothing else, and the number of
    traces. The copy is `None` if no word remains.

    >>> without_traces(parse_tree("(S (NP (-NONE- *)) (VP (VB Go)))"))
    (<Tree (S (VP (VB Go)))>, 1)
    """
    opened: list[Tree] = [Tree("", [])]
    traces = 0
    for event, node in tree.walk():
        if event == "(":
            opened.append(Tree(node.label, []))
        elif event == ")":
            _attach(opened, opened.pop())
        elif node.label == EMPTY_TAG:
            traces += 1
        else:
            opened[-1].children.append(Tree(node.label, list(node.children)))
    return next(iter(opened[0].children), None), traces


def without_functions(tree: Tree) -> tuple[Tree, int]:
    """Copy of a tree whose labels end before the first `-` or `=` (`NP-SBJ-1` becomes `NP`), and the number of labels
    that did not. Labels that begin with a hyphen, such as `-LRB-`, stay.

    >>> without_functions(parse_tree("(S (NP-SBJ-1 (PRP It)) (VP (VBZ =)))"))
    (<Tree (S (NP (PRP It)) (VP (VBZ =)))>, 1)
    """
    opened: list[Tree] = [Tree("", [])]
    changed = 0
    for event, node in tree.walk():
        if event == ")":
            _attach(opened, opened.pop())
            continue
        label = node.label if node.label[0] in "-=" else re.split("[-=]", node.label, maxsplit=1)[0]
        changed += label != node.label
        if event == "(":
            opened.append(Tree(label, []))
        else:
            opened[-1].children.append(Tree(label, list(node.children)))
    return opened[0].children[0], changed


def _attach(opened: list[Tree], closed: Tree) -> bool:
    """Give a closed phrase to the innermost open one if it has a child; return whether it has."""
    if closed.children:
        opened[-1].children.append(closed)
    return bool(closed.children)


def linearise(tree: Tree, tags: Literal["keep", "XX"] = "keep") -> list[str]:
    """Symbols of a tree: `n` words and `k` phrases make `n + 2 k` symbols.

    Args:
        tree (`Tree`): Tree of any depth.
        tags (`str`): `"keep"` writes the tags as the symbols of the words, `"XX"` that symbol for every word.

    >>> linearise(parse_tree("(S (NP (DT The) (NN dog)) (VP (VBZ barks)))"))
    ['(S', '(NP', 'DT', 'NN', ')NP', '(VP', 'VBZ', ')VP', ')S']
    """
    if tags not in ("keep", UNKNOWN_TAG):
        raise ValueError(f"tags: expected 'keep' or {UNKNOWN_TAG!r}, found {tags!r}.")
    return [
        event + node.label if event or tags == "keep" else UNKNOWN_TAG  # an event is the bracket
        for event, node in tree.walk()
    ]


MENDED = {
    "unreadable": "symbols that are neither a bracket nor a tag",
    "surplus words": "symbols for more words than there are",
    "missing words": "words without a symbol",
    "surplus brackets": "closing brackets without an opening one",
    "missing brackets": "phrases that were not closed",
    "early ends": "closing brackets of the root before the last word",
    "empty phrases": "phrases without a word",
    "missing roots": "trees without one root",
}


def restore(symbols: Iterable[str], words: list[str], tags: list[str] | None = None) -> tuple[Tree, Counter[str]]:
    """Build a well-formed tree over exactly these words from any symbols. Well-formed ones give their own tree.

    The rule, from left to right, with the kinds of `MENDED`:

    - A symbol is `(X`, `)X` or `X`, where `X` has neither a bracket nor white space. Others are dropped: *unreadable*.
    - The symbol of the i-th word stands for `words[i]`. Those behind the last word are dropped: *surplus words*.
    - A closing bracket closes the innermost open phrase of its label. Phrases that are still open inside it close too:
      *missing brackets*. Without such a phrase it is dropped: *surplus brackets*.
    - The root closes behind the last word that has a symbol. A bracket that would close it earlier closes only the
      phrases inside it: *early ends*.
    - A phrase without a word is dropped when it closes: *empty phrases*.
    - At the end, phrases that are still open close: *missing brackets*.
    - A root `TOP` is put over the result unless it is one phrase, or the tag of the only word: *missing roots*.
    - Words without a symbol follow as the last children of the root, with the tag `XX`: *missing words*.

    Args:
        symbols (`Iterable[str]`): Symbols of a linearised tree.
        words (`list[str]`): Words, at least one, without brackets and white space.
        tags (`list[str]`, *optional*): Tags of the words, instead of the symbols that stand for them.

    Returns:
        The tree, and the number of mended things by kind; it is empty if the symbols were well formed.

    Raises:
        ValueError: There are no words, not as many tags, or a word or tag is empty or has a bracket or white space.
    """
    _check_words(words, tags)
    readable, counts = _readable(symbols, len(words))
    leaves = iter(_leaves(readable, words, tags))
    ahead = sum(not bracket for bracket, _ in readable)
    top = Tree("", [])
    opened = [top]
    for bracket, label in readable:
        if bracket == "(":
            opened.append(Tree(label, []))
        elif not bracket:
            opened[-1].children.append(next(leaves))
            ahead -= 1
        elif (index := _innermost(opened, label)) is None:
            counts["surplus brackets"] += 1
        else:
            is_early = index == 1 and ahead > 0 and not top.children and any(tree.children for tree in opened[1:])
            counts["missing brackets"] += len(opened) - 1 - index
            counts["early ends"] += is_early
            _close_down_to(index + is_early, opened, counts)
    counts["missing brackets"] += len(opened) - 1
    _close_down_to(1, opened, counts)
    return _rooted(top, list(leaves), counts), +counts


def _check_words(words: list[str], tags: list[str] | None) -> None:
    if not words:
        raise ValueError("A tree needs at least one word.")
    if tags is not None and len(tags) != len(words):
        raise ValueError(f"Expected a tag for each of the {len(words)} words, found {len(tags)} tags.")
    for text in (*words, *(tags or ())):
        if not re.fullmatch(r"[^\s()]+", text):
            raise ValueError(f"A word of a tree has neither brackets nor white space, found {text!r}.")


def _readable(symbols: Iterable[str], words: int) -> tuple[list[tuple[str, str]], Counter[str]]:
    """Bracket, "" for a tag, and label of the readable symbols, with at most `words` tags; counts of the others."""
    readable, counts = [], Counter()
    for symbol in symbols:
        match = _SYMBOL.fullmatch(symbol)
        if match is None:
            counts["unreadable"] += 1
        elif not match[1] and words == 0:
            counts["surplus words"] += 1
        else:
            readable.append((match[1], match[2]))
            words -= not match[1]
    return readable, counts


def _leaves(symbols: list[tuple[str, str]], words: list[str], tags: list[str] | None) -> list[Tree]:
    """A tag for every word: the given one, or that of its symbol, or `XX` without a symbol."""
    predicted = [label for bracket, label in symbols if not bracket]
    labels = tags or predicted + [UNKNOWN_TAG] * (len(words) - len(predicted))
    return [Tree(label, [word]) for label, word in zip(labels, words)]


def _innermost(opened: list[Tree], label: str) -> int | None:
    """Index of the innermost open phrase of this label, behind the first, which stands for no phrase."""
    return next((index for index in range(len(opened) - 1, 0, -1) if opened[index].label == label), None)


def _close_down_to(index: int, opened: list[Tree], counts: Counter[str]) -> None:
    """Close the phrases from this index on, the innermost first."""
    while len(opened) > index:
        counts["empty phrases"] += not _attach(opened, opened.pop())


def _rooted(top: Tree, missing: list[Tree], counts: Counter[str]) -> Tree:
    """The only tree of `top`, or a new root over its trees, with the leaves that have no symbol as last children."""
    counts["missing words"] += len(missing)
    if len(top.children) == 1 and not (missing and top.children[0].is_tag):
        root = top.children[0]
    else:
        root = Tree(TOP, top.children)
        counts["missing roots"] += 1
    root.children += missing
    return root
