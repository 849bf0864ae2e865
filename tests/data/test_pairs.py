import gzip
import json
import logging
import os
import tempfile
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from training.data.encoding import FilteredStream, filter_by_length, lengths, share_of_stream, tokenize
from training.data.pairs import load_hub_pairs, load_pairs
from training.data.readers import DataError, read_columns, read_lines, read_pairs
from training.data.tokenizer import train_tokenizer


PAIRS = [
    ("A dog.", "Ein Hund."),
    ("Two  cats\u00a0sleep.", "Zwei Katzen\u2028schlafen."),
    ('He said "no".', "Er sagte „nein“."),
]


def write(path, text: str | bytes) -> str:
    data = text if isinstance(text, bytes) else text.encode("utf-8")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def write_parallel(folder, pairs=PAIRS, suffix="") -> list[str]:
    return [
        write(folder / f"data.{lang}{suffix}", "".join(pair[side] + "\n" for pair in pairs))
        for side, lang in enumerate(("en", "de"))
    ]


def read(files) -> list[tuple[str, str]]:
    dataset = load_pairs(files, "en", "de")
    return list(zip(dataset["source"], dataset["target"]))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_two_text_files(tmp_path, suffix):
    """Only a line feed ends a line, whatever other separators Unicode has."""
    assert read(write_parallel(tmp_path, suffix=suffix)) == PAIRS


def test_windows_line_ends_and_a_missing_last_one(tmp_path):
    files = [write(tmp_path / "a.en", "one\r\ntwo"), write(tmp_path / "a.de", "eins\r\nzwei\n")]
    assert read(files) == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_tsv(tmp_path, suffix):
    text = "".join("\t".join(pair) + "\n" for pair in PAIRS)
    assert read([write(tmp_path / f"data.tsv{suffix}", text)]) == PAIRS


@pytest.mark.parametrize("nested", [True, False])
def test_json_lines(tmp_path, nested):
    rows = [{"en": en, "de": de, "id": 1} for en, de in PAIRS]
    text = "".join(json.dumps({"translation": row} if nested else row) + "\n" for row in rows)
    assert read([write(tmp_path / "data.jsonl", text)]) == PAIRS


@pytest.mark.parametrize("nested", [True, False])
def test_parquet(tmp_path, nested):
    rows = [{"en": en, "de": de} for en, de in PAIRS]
    table = pyarrow.Table.from_pylist([{"translation": row} if nested else row for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    assert read([str(tmp_path / "data.parquet")]) == PAIRS


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("streaming", [False, True])
def test_hub_layouts(tmp_path, nested, streaming):
    """`load_dataset` on a local folder goes the same way as on the Hub. No text at all is an empty side."""
    rows = [{"en": en, "de": de} for en, de in [*PAIRS, (None, "leer")]]
    table = pyarrow.Table.from_pylist([{"translation": row} if nested else row for row in rows])
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    dataset = load_hub_pairs(str(tmp_path), None, "train", "de", "en", streaming=streaming)
    assert [(row["target"], row["source"]) for row in dataset] == [*PAIRS, ("", "leer")]
    with pytest.raises(DataError, match=r"no language 'fr'; found (en, de|de, en)"):
        load_hub_pairs(str(tmp_path), None, "train", "en", "fr", streaming=streaming)


def test_a_changed_file_is_read_again(tmp_path):
    files = write_parallel(tmp_path)
    assert len(read(files)) == 3
    write_parallel(tmp_path, PAIRS[:2])
    assert len(read(files)) == 2


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("one\ntwo\n", "eins\n", r"a\.de has 1 lines, .*a\.en has 2: line 2 has no counterpart"),
        ("one\n", "eins\nzwei\ndrei\n", r"a\.en has 1 lines, .*a\.de has 3: line 2"),
        ("one\n\n", "eins\nzwei\n", r"a\.en:2: empty en sentence"),
        ("one\ntwo\n", "eins\n \t\n", r"a\.de:2: empty de sentence"),
        ("one\n", b"eins\xff\n", r"a\.de:1: byte 0xff at column 5 is not UTF-8"),
        ("one\ntwo\n", b"eins\nzwei\xe4\n", r"a\.de:2: byte 0xe4 at column 5"),
        ("", "", r"a\.en: empty file"),
        ("", "eins\n", r"a\.en has 0 lines"),
    ],
)
def test_what_is_wrong_with_text_files_is_named(tmp_path, source, target, message):
    with pytest.raises(DataError, match=message):
        load_pairs([write(tmp_path / "a.en", source), write(tmp_path / "a.de", target)], "en", "de")


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ("ein\nschön\n".encode("latin-1"), ["a.de:2:", "0xf6 at column 4", "iconv -f latin1 -t utf8"]),
        ("schön\n".encode("utf-16"), ["a.de:1:", "0xff at column 1", "iconv -f utf16 -t utf8"]),
        ("schön\n".encode("utf-16-le"), ["a.de:1:", "0xf6 at column 7", "iconv -f utf16 -t utf8"]),
        ("ein\nzwei\n".encode("utf-16-be"), ["a.de:1:", "0x00 at column 1", "iconv -f utf16 -t utf8"]),
        (gzip.compress(b"ein\n", mtime=0), ["a.de:1:", "0x8b at column 2", ".gz"]),
    ],
)
def test_another_encoding_is_named_with_its_conversion(tmp_path, content, facts):
    with pytest.raises(DataError) as caught:
        list(read_lines(write(tmp_path / "a.de", content)))
    assert all(fact in str(caught.value) for fact in facts), caught.value


@pytest.mark.parametrize("content", ["schön\nein ".encode() + b"\xe4\n", "schön ".encode() + b"\xe4\n"])
def test_damaged_utf8_is_not_called_another_encoding(tmp_path, content):
    with pytest.raises(DataError, match="0xe4") as caught:
        list(read_lines(write(tmp_path / "a.de", content)))
    assert "iconv" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "one\teins\ntwo zwei\n", r"a\.tsv:2: expected 2 columns.*found 1"),
        ("a.tsv", "one\teins\textra\n", r"a\.tsv:1: expected 2 columns.*found 3"),
        ("a.tsv", "one\teins\n\tzwei\n", r"a\.tsv:2: empty en sentence"),
        ("a.tsv", "", r"a\.tsv: empty file"),
        ("a.jsonl", '{"en": "one", "de": "eins"}\n{"en": "tw\n', r"a\.jsonl:2: not a JSON object"),
        ("a.jsonl", '{"en": "one", "fr": "un"}\n', r"a\.jsonl:1: no column 'de'; found en, fr"),
        ("a.jsonl", '{"en": "one", "de": null}\n', r"a\.jsonl:1: column 'de' is not text: None"),
        ("a.jsonl", '["one", "eins"]\n', r"a\.jsonl:1: expected an object"),
        ("a.jsonl", '{"en": "one", "de": " "}\n', r"a\.jsonl:1: empty de sentence"),
        ("a.parquet", "not parquet", r"a\.parquet: cannot be read as a Parquet file"),
        ("a.jsonl", '{"en": "one", "de": ' + "9" * 5000 + "}\n", r"a\.jsonl:1: not a JSON object: .*5000 digits"),
        ("a.jsonl", '{"en": ' + "[" * 5000 + "]" * 5000 + "}\n", r"a\.jsonl:1: not a JSON object: .*recursion"),
        ("a.jsonl", '{"en": ' + "[" * 900 + "]" * 900 + ', "de": "eins"}\n', r"a\.jsonl:1: column 'en' is not text"),
        (
            "a.jsonl",
            '{"translation": 3}\n',
            r"a\.jsonl:1: column 'translation': expected an object.*en and de.*found 3",
        ),
        (
            "a.jsonl",
            '{"translation": ["one", "eins"]}\n',
            r"a\.jsonl:1: column 'translation'.*found \['one', 'eins'\]",
        ),
        ("a.jsonl", '{"translation": {}}\n', r"a\.jsonl:1: no column 'en'; found none"),
        ("a.txt", "one\n", r"a\.txt: one file of pairs must end in \.tsv"),
    ],
)
def test_what_is_wrong_with_a_file_of_pairs_is_named(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        load_pairs([write(tmp_path / name, text)], "en", "de")


def write_parquet(path, columns: dict, **options) -> str:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return str(path)


def no_utf8() -> pyarrow.Array:
    """Said to be text."""
    buffers = pyarrow.array([b"one", b"tw\xff"], pyarrow.binary()).buffers()
    return pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"en": ["one"], "fr": ["un"]}, r"a\.parquet: no column 'de'; found en, fr"),
        ({"en": ["one"], "de": [3]}, r"a\.parquet: row 1: column 'de' is not text: 3"),
        ({"en": ["one"], "de": [b"eins"]}, r"a\.parquet: row 1: column 'de' is not text: b'eins'"),
        ({"translation": [{"en": "one", "de": "eins"}, None]}, r"row 2: column 'translation': expected.*found None"),
        ({"translation": ["one"]}, r"a\.parquet: row 1: column 'translation': expected an object.*found 'one'"),
        ({"en": no_utf8(), "de": ["eins", "zwei"]}, r"a\.parquet: .*'utf-8' codec can't decode byte 0xff"),
        ({"en": pyarrow.array([2**62], pyarrow.timestamp("us")), "de": ["eins"]}, r"a\.parquet: .*cannot be read"),
    ],
)
def test_what_is_wrong_with_columns_of_parquet_is_named(tmp_path, columns, message):
    with pytest.raises(DataError, match=message):
        load_pairs([write_parquet(tmp_path / "a.parquet", columns)], "en", "de")


def test_columns_of_parquet_that_nobody_asks_for_may_be_anything(tmp_path):
    columns = {"en": ["one"], "de": ["eins"], "when": pyarrow.array([2**62], pyarrow.timestamp("us"))}
    assert read([write_parquet(tmp_path / "a.parquet", columns)]) == [("one", "eins")]


def test_damaged_pages_of_parquet_are_named(tmp_path):
    """Wherever the damage is, the file is read or the error names it."""
    columns = {"en": [f"one {i}" for i in range(500)], "de": [f"eins {i}" for i in range(500)]}
    whole = Path(
        write_parquet(tmp_path / "a.parquet", columns, compression="snappy", use_dictionary=False)
    ).read_bytes()
    refused = 0
    for place in range(4, len(whole), len(whole) // 60):
        (tmp_path / "a.parquet").write_bytes(whole[:place] + b"\xff\xff\xff" + whole[place + 3 :])
        try:
            list(read_pairs([str(tmp_path / "a.parquet")], ("en", "de")))
        except DataError as error:
            assert "a.parquet" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 10


def unprivileged(action) -> str:
    """Error of an action in a process of an unprivileged user."""
    read_end, write_end = os.pipe()
    if not (child := os.fork()):
        try:
            os.seteuid(65534)
            action()
            message = "no error"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(write_end, message.encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, encoding="utf-8") as told:
        message = told.read()
    os.waitpid(child, 0)
    return message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("closed", ["the file", "its folder"])
def test_a_file_without_permission_is_named_and_not_called_missing(closed):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are root's alone
        os.chmod(folder, 0o755)
        place = Path(folder, "inner")
        place.mkdir(mode=0o755)
        file = write(place / "a.tsv", "one\teins\n")
        os.chmod(file if closed == "the file" else place, 0)
        for check in (lambda: load_pairs([file], "en", "de"), lambda: read_columns([file])):
            assert unprivileged(check) == f"OSError: {file}: cannot be read: Permission denied."


def test_a_pipe_or_a_device_is_refused_where_data_are_read_twice(tmp_path):
    os.mkfifo(tmp_path / "a.tsv")
    for file in (str(tmp_path / "a.tsv"), "/dev/zero"):
        for streaming in (False, True):
            with pytest.raises(OSError, match=f"{file}: expected a regular file.*found a pipe or a device"):
                load_pairs([file], "en", "de", streaming=streaming)
    with pytest.raises(OSError, match=r"'a\\x00b'|a\x00b: cannot be read: embedded null byte"):
        load_pairs(["a\0b"], "en", "de")


def test_a_pipe_is_scored(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    other = write(tmp_path / "other", "eins\nzwei\n")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=("one\ntwo\n",))
    writer.start()
    assert read_columns([str(tmp_path / "pipe"), other]) == [["one", "two"], ["eins", "zwei"]]
    writer.join()


def test_a_line_without_an_end_fills_no_memory(tmp_path):
    """A device, and a gzip file of 200 kB that expands to 200 MB."""
    bomb = tmp_path / "a.gz"
    with gzip.open(bomb, "wb") as file:
        for _ in range(200):
            file.write(b"a" * 10**6)
    for name in ("/dev/zero", str(bomb)):
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=f"{name}:1: the line has more than 16,777,216 bytes"):
                list(read_lines(name))
            assert tracemalloc.get_traced_memory()[1] < 60e6
        finally:
            tracemalloc.stop()


def test_the_longest_line_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("training.data.readers.LONGEST_LINE", 6)
    assert list(read_lines(write(tmp_path / "a", "abcde\n123456"))) == ["abcde", "123456"]
    with pytest.raises(DataError, match=r"a:2: the line has more than 6 bytes"):
        list(read_lines(write(tmp_path / "a", "one\n1234567\n")))


def test_a_damaged_gzip_file_is_named(tmp_path):
    files = write_parallel(tmp_path, PAIRS * 1000, ".gz")
    whole = (tmp_path / "data.de.gz").read_bytes()
    for broken in (whole[: len(whole) // 2], b"no gzip at all", whole[:40] + bytes(20) + whole[60:]):
        (tmp_path / "data.de.gz").write_bytes(broken)
        with pytest.raises(DataError, match=r"data\.de\.gz:\d+: cannot be read"):
            load_pairs(files, "en", "de")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.tsv: no such file"):
        load_pairs([str(tmp_path / "none.tsv")], "en", "de")
    with pytest.raises(DataError, match="got 3"):
        load_pairs(["a", "b", "c"], "en", "de")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder, not a file"):
        load_pairs([str(tmp_path)], "en", "de")


def test_a_byte_order_mark_is_no_text(tmp_path):
    files = [write(tmp_path / "a.en", b"\xef\xbb\xbfone\ntwo\n"), write(tmp_path / "a.de", "eins\nzwei\n")]
    assert read(files) == [("one", "eins"), ("two", "zwei")]


def test_half_a_surrogate_pair_is_named(tmp_path):
    file = write(tmp_path / "a.jsonl", '{"en": "one", "de": "eins"}\n{"en": "two \\ud83d", "de": "zwei"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: column 'en' holds half a surrogate pair"):
        load_pairs([file], "en", "de")


def test_empty_pairs_can_be_dropped_and_are_counted_every_time(tmp_path, tokenizer):
    files = write_parallel(tmp_path, [*PAIRS, ("", "leer"), ("empty", " \t")])
    for _ in range(2):  # the second time from the cache
        kept, report = filter_by_length(tokenize(load_pairs(files, "en", "de", drop_empty=True), tokenizer))
        assert list(zip(kept["source"], kept["target"])) == PAIRS
        assert (report.pairs, report.kept, report.empty) == (5, 3, 2)


def test_a_stream_is_filtered_and_counted_alike(tmp_path, tokenizer, caplog):
    pairs = [*PAIRS, ("", "leer"), ("A dog. " * 50, "Ein Hund."), ("A dog.", "Ein Hund. " * 6)]
    stream = tokenize(load_pairs(write_parallel(tmp_path, pairs), "en", "de", True, streaming=True), tokenizer)
    with caplog.at_level(logging.INFO):
        kept = list(FilteredStream(stream, max_length=100, max_ratio=2.0))
    assert [(row["source"], row["target"]) for row in kept] == PAIRS
    assert "3 of 6 pairs kept; dropped: 1 empty, 1 too long, 1 by length ratio" in caplog.text


def test_a_filtered_stream_goes_on_where_it_was(tmp_path, tokenizer, caplog):
    pairs = [("", "leer"), *PAIRS, ("A dog. " * 50, "Ein Hund.")]
    files = write_parallel(tmp_path, pairs)

    def stream():
        return FilteredStream(tokenize(load_pairs(files, "en", "de", True, streaming=True), tokenizer), 100)

    first = stream()
    iterator = iter(first)
    assert next(iterator)["source"] == PAIRS[0][0]
    state = json.loads(json.dumps(first.state_dict()))
    second = stream()
    second.load_state_dict(state)
    with caplog.at_level(logging.INFO):
        assert [row["source"] for row in second] == [source for source, _ in PAIRS[1:]]
    assert f"{len(PAIRS)} of {len(pairs)} pairs kept; dropped: 1 empty, 1 too long" in caplog.text
    second.load_state_dict(None)
    assert [row["source"] for row in second] == [source for source, _ in PAIRS]


def test_tokenised_pairs_have_ids_and_lengths(tmp_path, tokenizer):
    dataset = tokenize(load_pairs(write_parallel(tmp_path), "en", "de"), tokenizer)
    for row, (source, target) in zip(dataset, PAIRS):
        assert tokenizer.decode(row["input_ids"], skip_special_tokens=True) == source
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == target
        assert (row["source_length"], row["target_length"]) == (len(row["input_ids"]), len(row["labels"]))
    assert [len(ids) for ids in dataset["input_ids"]] == lengths(dataset)[0].tolist()


def test_filters_drop_and_count(tmp_path, tokenizer):
    pairs = [("A dog.", "Ein Hund."), ("A dog. " * 50, "Ein Hund."), ("A dog.", "Ein Hund. " * 6)]
    dataset = tokenize(load_pairs(write_parallel(tmp_path, pairs), "en", "de"), tokenizer)
    assert max(lengths(dataset)[0]) > 100
    assert max(lengths(dataset)[1]) < 100
    kept, report = filter_by_length(dataset, max_length=100, max_ratio=2.0)
    assert kept["source"][:] == ["A dog."]
    assert (report.pairs, report.kept, report.too_long, report.ratio) == (3, 1, 1, 1)
    assert str(report) == "1 of 3 pairs kept; dropped: 0 empty, 1 too long, 1 by length ratio"
    with pytest.raises(DataError, match=r"No pair is left.*3 too long"):
        filter_by_length(dataset, max_length=1)


@pytest.mark.parametrize("num_proc", [None, 2])
def test_tokenised_pairs_are_cached_by_vocabulary_not_by_where_it_was_loaded_from(
    tmp_path, tokenizer, monkeypatch, num_proc
):
    """As when a run goes on from its checkpoint."""
    files = write_parallel(tmp_path)
    expected = tokenize(load_pairs(files, "en", "de"), tokenizer, num_proc)["labels"][:]
    other = train_tokenizer(["Ein Hund.", "A dog."], 265, show_progress=False)
    assert tokenize(load_pairs(files, "en", "de"), other, num_proc)["labels"][:] != expected
    tokenizer.save_pretrained(tmp_path / "checkpoint-7")
    moved = AutoTokenizer.from_pretrained(tmp_path / "checkpoint-7")
    monkeypatch.setattr(type(moved), "__call__", lambda *args, **kwargs: pytest.fail("it tokenises again"))
    assert tokenize(load_pairs(files, "en", "de"), moved)["labels"][:] == expected


def of_lengths(source: np.ndarray, target: np.ndarray) -> Dataset:
    return Dataset.from_dict({"row": np.arange(len(source)), "source_length": source, "target_length": target})


def test_lengths_follow_the_rows_that_were_chosen():
    source, target = np.arange(1, 101), np.arange(201, 301)
    chosen = [99, 3, 3, 40]
    dataset = of_lengths(source, target)
    for rows in (dataset.select(chosen), dataset.select(range(20, 60)).select([79 - 20 - 20, 0])):
        found = lengths(rows)
        assert [side.dtype for side in found] == [np.int32, np.int32]
        assert found[0].tolist() == rows["source_length"][:]
        assert found[1].tolist() == rows["target_length"][:]
    assert lengths(dataset.select(chosen))[0].tolist() == [100, 4, 4, 41]


def test_lengths_are_not_turned_into_python_integers():
    dataset = of_lengths(np.full(100_000, 300), np.full(100_000, 400)).select(np.arange(0, 100_000, 2))
    tracemalloc.start()
    try:
        assert [int(side.sum()) for side in lengths(dataset)] == [15_000_000, 20_000_000]
        assert tracemalloc.get_traced_memory()[1] < 100_000 * 20
    finally:
        tracemalloc.stop()


def test_pairs_are_counted_and_kept_alike_over_many_blocks(monkeypatch):
    monkeypatch.setattr("training.data.encoding.BLOCK", 7)
    rng = np.random.default_rng(0)
    source, target = rng.integers(0, 40, (2, 1000))
    kept, report = filter_by_length(of_lengths(source, target), max_length=30, max_ratio=2.0)
    expected = [
        row
        for row, (a, b) in enumerate(zip(source.tolist(), target.tolist()))
        if min(a, b) > 0 and max(a, b) <= 30 and max(a, b) <= 2 * min(a, b)
    ]
    assert kept["row"][:] == expected
    assert lengths(kept)[0].tolist() == source[expected].tolist()
    assert report.pairs == 1000
    assert report.kept == len(expected)
    assert report.empty == sum(min(pair) == 0 for pair in zip(source.tolist(), target.tolist()))


def test_the_shares_of_a_stream_are_whole_files_and_hold_every_pair_once(tmp_path, tokenizer, caplog):
    for number in range(4):
        rows = [{"translation": {"en": f"dog {number}", "de": f"Hund {number} {i}"}} for i in range(number + 1)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"train-{number}.parquet")
    stream = tokenize(load_hub_pairs(str(tmp_path), None, "train", "en", "de", streaming=True), tokenizer)
    with caplog.at_level(logging.INFO):
        shares = [[row["target"] for row in share_of_stream(FilteredStream(stream), rank, 2)] for rank in range(2)]
    assert {text.split()[1] for text in shares[0]}.isdisjoint(text.split()[1] for text in shares[1])
    assert sorted(shares[0] + shares[1]) == sorted(f"Hund {n} {i}" for n in range(4) for i in range(n + 1))
    assert "A pass over device 1's share of the training data" in caplog.text
    assert [row["target"] for row in share_of_stream(stream, 0, 2)] == shares[0]
    assert share_of_stream(FilteredStream(stream), 0, 3) is None
    assert len(list(share_of_stream(stream, 0, 1))) == 10


def test_other_limits_are_not_answered_from_the_cache(tmp_path):
    of_lengths(np.array([5, 10, 20, 40]), np.array([6, 9, 20, 41])).save_to_disk(tmp_path / "pairs")
    for limit, rows in ((20, [0, 1, 2]), (19, [0, 1]), (6, [0]), (10, [0, 1]), (40, [0, 1, 2])):
        kept, report = filter_by_length(Dataset.load_from_disk(tmp_path / "pairs"), max_length=limit)
        assert kept["row"][:] == rows
        assert report.kept == len(rows)
    assert list((tmp_path / "pairs").glob("cache-*"))
