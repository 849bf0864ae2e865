import gzip
import logging

import pytest

from training.data.pairs import load_pairs
from training.data.readers import DataError
from training.data.treebanks import TreeOptions


FLAT = "(TOP (S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .)))\n(TOP (NP (-LRB- -LRB-) (NN x) (-RRB- -RRB-)))\n"
SPREAD = (
    "( (S\n    (NP (DT the) (NN dog))\n    (VP (VBZ barks)) (. .)))\n\n( (NP (-LRB- -LRB-) (NN x)\n (-RRB- -RRB-)) )\n"
)
ROWS = [
    ("the dog barks .", "(S (NP DT NN )NP (VP VBZ )VP . )S", "(S (NP (DT the) (NN dog)) (VP (VBZ barks)) (. .))"),
    ("-LRB- x -RRB-", "(NP -LRB- NN -RRB- )NP", "(NP (-LRB- -LRB-) (NN x) (-RRB- -RRB-))"),
]
PENN = (
    "(S (NP-SBJ-1 (DT the) (NN dog)) (VP (VBZ wants) (S (NP-SBJ (-NONE- *-1)) (VP=2 (TO to) (VP (VB bark))))))\n"
    "(NP (-NONE- 0))\n(NP-TTL (NNS Dogs))\n"
)


def write(path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def read(files: list[str], streaming: bool = False, **options) -> list[tuple[str, str, str]]:
    rows = load_pairs(files, "en", "trees", streaming=streaming, trees=TreeOptions(**options))
    return [(row["source"], row["target"], row["tree"]) for row in rows]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.trees", "a.trees.gz"])
@pytest.mark.parametrize("text", [FLAT, SPREAD], ids=["one a line", "spread over lines"])
def test_one_file_gives_words_and_symbols_without_the_root(tmp_path, name, text, streaming):
    assert read([write(tmp_path / name, text)], streaming) == ROWS


def test_a_root_over_several_trees_stays(tmp_path):
    [row] = read([write(tmp_path / "a.trees", "(TOP (NP (NN a)) (VP (VB b)))\n")])
    assert row[1] == "(TOP (NP NN )NP (VP VB )VP )TOP"


def test_one_symbol_for_all_tags(tmp_path):
    targets = [target for _, target, _ in read([write(tmp_path / "a.trees", FLAT)], tags="XX")]
    assert targets == ["(S (NP XX XX )NP (VP XX )VP XX )S", "(NP XX XX XX )NP"]


def test_traces_and_function_tags_are_removed_on_request_and_counted_each_time(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    file = write(tmp_path / "penn.trees", PENN)
    assert read([file])[0][0] == "the dog wants *-1 to bark" and "penn.trees" not in caplog.text
    for _ in range(2):  # the second time, from the cache
        caplog.clear()
        assert [row[:2] for row in read([file], strip=True)] == [
            ("the dog wants to bark", "(S (NP DT NN )NP (VP VBZ (S (VP TO (VP VB )VP )VP )S )VP )S"),
            ("Dogs", "(NP NNS )NP"),
        ]
        # NP-SBJ-1, VP=2 and NP-TTL; the label NP-SBJ went with its trace.
        facts = f"{file}: 2 traces and 3 function tags removed from 3 trees; 1 trees without words dropped"
        assert facts in caplog.text


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "place"),
    [
        (FLAT + "(S (NP (NN a))\n", ":3: column 1: "),
        (FLAT + "(S (NN a)) b\n", ":3: column 12: "),
        ("(S (NN a))\n\n(S (NN))\n", ":3: column 4: "),
        ("(S\n (NN a))\n (NN b))\n", ":3: column 8: "),
    ],
)
def test_a_broken_tree_names_file_and_line(tmp_path, text, place, streaming):
    file = write(tmp_path / "broken.trees", text)
    with pytest.raises(DataError) as error:
        read([file], streaming)
    assert str(error.value).startswith(file + place)


def test_a_file_without_trees_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"empty\.trees: no trees"):
        read([write(tmp_path / "empty.trees", "\n")])
    with pytest.raises(FileNotFoundError, match=r"none\.trees: no such file"):
        read([str(tmp_path / "none.trees")])


def test_files_are_read_as_often_as_their_weights_say(tmp_path):
    gold = write(tmp_path / "gold.trees", "(A (B c))\n")
    silver = write(tmp_path / "silver.trees", "(D (E f))\n(D (E g))\n")
    assert [row[0] for row in read([gold, silver])] == ["c", "f", "g"]
    assert [row[0] for row in read([gold, silver], weights=(3, 1))] == ["c", "c", "c", "f", "g"]
    with pytest.raises(DataError, match="each of the 2 files, found 1"):
        read([gold, silver], weights=(3,))


def test_trees_and_other_files_do_not_mix(tmp_path):
    trees, text = write(tmp_path / "a.trees", FLAT), write(tmp_path / "a.de", "eins\nzwei\n")
    with pytest.raises(DataError, match=r"a\.de: expected only files of trees"):
        read([trees, text])
    with pytest.raises(DataError, match=r"tree_weights: expected only \.trees files"):
        read([write(tmp_path / "a.tsv", "a\tb\n")], weights=(2,))


def test_a_changed_file_is_read_again(tmp_path):
    file = write(tmp_path / "a.trees", FLAT)
    assert len(read([file])) == 2
    write(tmp_path / "a.trees", FLAT + "(A (B c))\n")
    assert len(read([file])) == 3
