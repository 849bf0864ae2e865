"""A partial output: what it can be gone on with, and what is refused."""

import gzip
import json
import multiprocessing
import shutil

import pytest

from training.inference import resumable_output
from training.inference.corpus import Line
from training.inference.resumable_output import PartialOutput


JOB = {"settings": {"window": 2, "options": {}}, "files": {"model.safetensors of model 1": "a1", "config.json": "b2"}}
TEXTS = ["one", "two", "three", "four", "five"]


def lines(texts, prefix=""):
    return [Line(number, text, prefix) for number, text in enumerate(texts, start=1)]


def translate(output, texts=TEXTS, stop=None, resume=False, job=JOB, prefix=""):
    """Write every text in capitals, in windows of two; interrupted when `stop` of them are written, and half a one."""
    source = lines(texts, prefix)
    with PartialOutput(str(output), job, iter(source), resume, len(source)) as file:
        assert file.sentences % 2 == 0 or file.sentences == len(source)
        for start in range(file.sentences, len(source), 2):
            for number, line in enumerate(source[start : start + 2], start=start):
                if number == stop:
                    file.write(line.text[:2])
                    raise KeyboardInterrupt
                file.write(line.text.upper() + "\n")
            file.end_window(source[start : start + 2])
        if stop == len(source):
            raise KeyboardInterrupt
    return output


def interrupted(output, stop=3, **options):
    with pytest.raises(KeyboardInterrupt):
        translate(output, stop=stop, **options)
    return output.with_name(output.name + ".partial"), output.with_name(output.name + ".partial.json")


def refused(output, *facts, kind=ValueError, **options):
    """Resuming is one line with these facts, and changes nothing."""
    before = {path: path.read_bytes() for path in output.parent.iterdir()}
    with pytest.raises(kind) as error:
        translate(output, resume=True, **options)
    assert all(fact in str(error.value) for fact in facts), error.value
    assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in output.parent.iterdir()} == before


@pytest.mark.parametrize("name", ["out", "out.gz"])
@pytest.mark.parametrize("stop", range(6))
def test_an_interruption_anywhere_is_gone_on_from_a_whole_window(name, stop, tmp_path):
    partial, _ = interrupted(tmp_path / name, stop)
    assert not (tmp_path / name).exists() and partial.exists()
    seen = []
    write = PartialOutput.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PartialOutput, "write", lambda self, text: (seen.append(text), write(self, text)))
        translate(tmp_path / name, resume=True)
    assert "".join(seen).split() == [text.upper() for text in TEXTS[5 if stop == 5 else stop // 2 * 2 :]]
    data = (tmp_path / name).read_bytes()
    assert (gzip.decompress(data) if name == "out.gz" else data) == b"ONE\nTWO\nTHREE\nFOUR\nFIVE\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_input_behind_what_is_translated_may_change(tmp_path):
    interrupted(tmp_path / "out")
    texts = ["one", "two", "drei", "vier", "fünf", "sechs"]
    assert translate(tmp_path / "out", texts, resume=True).read_text() == "ONE\nTWO\nDREI\nVIER\nFÜNF\nSECHS\n"


def test_another_input_is_refused(tmp_path):
    output = tmp_path / "out"
    interrupted(output)
    refused(output, "2 lines", texts=["one", "TWO", *TEXTS[2:]])
    refused(output, "2 lines", texts=["onet", "wo", *TEXTS[2:]])
    refused(output, "2 lines", prefix="Ein")
    refused(output, "3 lines", "1", texts=TEXTS[:1])
    output = tmp_path / "end"
    interrupted(output, stop=5)
    refused(output, "line 5", texts=[*TEXTS, "six"])  # its last window would have been another


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("settings", "window", 4),
        ("settings", "options", {"num_beams": 3}),
        ("settings", "new", 1),
        ("files", "model.safetensors of model 1", "c3"),
        ("files", "model.safetensors of model 2", "c3"),
    ],
)
def test_another_job_is_refused(part, name, value, tmp_path):
    interrupted(tmp_path / "out")
    refused(tmp_path / "out", "another run", name, job={**JOB, part: {**JOB[part], name: value}})
    assert translate(tmp_path / "out", resume=True).exists()


def test_a_partial_file_that_was_changed_is_refused(tmp_path):
    partial, _ = interrupted(tmp_path / "out")
    partial.write_text("ONE\n")
    refused(tmp_path / "out", "4 bytes", "8")
    partial.write_text("ONE\nSIX\n")
    refused(tmp_path / "out", "checksum")
    partial.write_text("ONE\nTWO\n" + "FOUR\n" * 4)
    refused(tmp_path / "out", "6 lines", "5")
    partial.unlink()
    refused(tmp_path / "out", "there is no", kind=FileNotFoundError)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: [],
        lambda record: 3,
        lambda record: {},
        lambda record: {**record, "version": 3},
        lambda record: {**record, "job": {"settings": [], "files": {}}},
        lambda record: {**record, "done": 3},
        lambda record: {**record, "done": {**record["done"], "sentences": -2}},
        lambda record: {**record, "done": {**record["done"], "bytes": "8"}},
        lambda record: {**record, "done": {**record["done"], "input": None}},
    ],
)
def test_a_record_that_is_none_is_one_line(change, tmp_path):
    _, record = interrupted(tmp_path / "out")
    record.write_text(json.dumps(change(json.loads(record.read_text()))))
    refused(tmp_path / "out", "out.partial.json", "damaged", "delete", "out.partial ")


def test_a_record_that_is_cut_or_no_json_is_one_line(tmp_path):
    _, record = interrupted(tmp_path / "out")
    whole = record.read_bytes().rstrip()
    broken = [whole[:size] for size in range(0, len(whole), 7)]
    for data in [*broken, b"\xff\xfe", b"[" * 100_000, b'{"version": ' + b"9" * 5000 + b"}"]:
        record.write_bytes(data)
        refused(tmp_path / "out", "out.partial.json", "damaged")
    record.unlink()
    refused(tmp_path / "out", "out.partial.json", kind=FileNotFoundError)


def test_a_record_of_the_earlier_form_is_refused(tmp_path):
    _, record = interrupted(tmp_path / "out")
    old = {"model": "runs/mine", "dtype": "auto", "options": {}, "input": "in", "content": "5 bytes, ab", "n_best": 1}
    record.write_text(json.dumps(old))
    refused(tmp_path / "out", "earlier version", "out.partial.json", "delete")


def test_an_earlier_run_is_not_begun_anew(tmp_path):
    partial, record = interrupted(tmp_path / "out")
    before = partial.read_bytes(), record.read_bytes()
    with pytest.raises(FileExistsError, match=r"out\.partial holds an earlier run: .*--resume"):
        translate(tmp_path / "out")
    assert (partial.read_bytes(), record.read_bytes()) == before


def test_what_another_has_begun_meanwhile_is_not_appended_to(tmp_path):
    """Both have seen that there is nothing yet; the first is interrupted when the second begins."""
    second = PartialOutput(str(tmp_path / "out"), JOB, iter([]))
    PartialOutput.check(str(tmp_path / "out"), resume=False)
    partial, _ = interrupted(tmp_path / "out")
    before = partial.read_bytes()
    with pytest.raises(FileExistsError, match=r"out\.partial holds an earlier run"):
        second.__enter__()
    assert partial.read_bytes() == before


def rival(output, resume, start, decided, statuses):
    finish = PartialOutput._finish

    def last(self):
        for _ in range(2):  # the others have lost; one that came later could begin anew, rightly
            assert decided.acquire(timeout=60)
        finish(self)

    PartialOutput._finish = last
    start.wait(60)
    try:
        translate(output, resume=resume)
        statuses.put("written")
    except OSError as error:
        statuses.put(type(error).__name__)
        decided.release()


@pytest.mark.parametrize("resume", [False, True])
def test_of_processes_at_the_same_moment_one_writes(resume, tmp_path):
    context = multiprocessing.get_context("fork")
    for number in range(20):
        output = tmp_path / str(number)
        if resume:
            interrupted(output)
        start, decided, statuses = context.Barrier(3), context.Semaphore(0), context.SimpleQueue()
        rivals = [context.Process(target=rival, args=(output, resume, start, decided, statuses)) for _ in range(3)]
        for each in rivals:
            each.start()
        found = [statuses.get() for _ in rivals]
        for each in rivals:
            each.join()
        found.remove("written")
        assert set(found) <= ({"BlockingIOError"} if resume else {"BlockingIOError", "FileExistsError"})
        assert output.read_text() == "ONE\nTWO\nTHREE\nFOUR\nFIVE\n"
    assert len(list(tmp_path.iterdir())) == 20


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("ending", ["partial", "partial.json"])
def test_a_symbolic_link_in_the_place_of_a_partial_file_is_not_followed(ending, resume, tmp_path):
    precious = tmp_path / "elsewhere" / "precious"
    precious.parent.mkdir()
    if resume:
        interrupted(tmp_path / "out")
        shutil.move(tmp_path / f"out.{ending}", precious)
    else:
        precious.write_text("precious")
    (tmp_path / f"out.{ending}").symlink_to(precious)
    before = precious.read_bytes()
    if ending == "partial":
        with pytest.raises(OSError, match=r"out\.partial"):
            translate(tmp_path / "out", resume=resume)
        assert not (tmp_path / "out").exists()
    else:
        translate(tmp_path / "out", resume=resume)
    assert precious.read_bytes() == before


def test_a_partial_file_that_another_has_replaced_is_nobodys_output(tmp_path):
    """Somebody deletes it while it is written, and begins anew."""
    output = tmp_path / "out"
    replaced = pytest.raises(FileNotFoundError, match=r"out\.partial was moved or replaced")
    with replaced, PartialOutput(str(output), JOB, iter([])) as file:
        file.write("EINS\n")
        file.partial.unlink()
        interrupted(output)
    assert not output.exists()
    assert translate(output, resume=True).read_text() == "ONE\nTWO\nTHREE\nFOUR\nFIVE\n"


def test_an_interruption_while_it_is_compressed_loses_nothing(tmp_path, monkeypatch):
    def full(*files):
        raise OSError("No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(resumable_output.shutil, "copyfileobj", full)
        with pytest.raises(OSError, match="No space left"):
            translate(tmp_path / "out.gz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gz.partial", "out.gz.partial.json"]
    translate(tmp_path / "out.gz", resume=True)
    assert gzip.decompress((tmp_path / "out.gz").read_bytes()).split() == [text.upper().encode() for text in TEXTS]
    assert [path.name for path in tmp_path.iterdir()] == ["out.gz"]


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(resumable_output.fcntl, "flock", no_locks)
    assert translate(tmp_path / "out").exists()
    assert "out.partial" in caplog.text and "Function not implemented" in caplog.text
