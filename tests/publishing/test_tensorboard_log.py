"""TensorBoard's files of a run, as they are published."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from training.publishing.tensorboard_log import event_files, scalars


@pytest.fixture
def run(tmp_path) -> Path:
    """Two starts: updates 1 and 2, and, by the month's name first, 3 to 5; a third one ended before it logged."""
    starts = {"Dec31_23-59-59_secret-host": (1, 2), "Apr01_00-00-00_secret-host": (3, 4, 5), "Apr02_secret-host": ()}
    for number, (folder, steps) in enumerate(starts.items()):
        writer = SummaryWriter(str(tmp_path / "run" / "runs" / folder))
        writer.add_text("args", '{"output_dir": "/home/me/run"}')
        for step in steps:
            writer.add_scalar("train/loss", 10 - step, step)
        writer.close()
        [file] = (tmp_path / "run" / "runs" / folder).iterdir()
        file.rename(file.with_name(f"events.out.tfevents.{1_700_000_000 + number}.secret-host.17.0"))
    return tmp_path / "run"


def read(content: bytes, folder: Path) -> tuple[dict, list[tuple[int, float]]]:
    """By TensorBoard: the kinds of what a file has, and its losses."""
    folder.mkdir()
    (folder / "events.out.tfevents.0").write_bytes(content)
    found = EventAccumulator(str(folder)).Reload()
    return found.Tags(), [(event.step, event.value) for event in found.Scalars("train/loss")]


def test_scalars_are_kept_and_nothing_of_the_machine(run, tmp_path):
    files = scalars(event_files(run), last_step=4)
    assert list(files) == ["runs/events.out.tfevents.0", "runs/events.out.tfevents.1"]
    first, second = (read(content, tmp_path / name.rpartition(".")[2]) for name, content in files.items())
    assert first[1] == [(1, 9.0), (2, 8.0)] and second[1] == [(3, 7.0), (4, 6.0)]
    for tags, _ in (first, second):
        assert [name for name, found in tags.items() if found] == ["scalars"]
    assert not [word for word in (b"/home/me", b"secret-host", b"args") for found in files.values() if word in found]
    assert scalars(event_files(run), last_step=4) == files


def test_a_file_that_a_killed_run_left_is_kept_as_far_as_it_goes(run, tmp_path):
    file = event_files(run)[0]
    file.write_bytes(file.read_bytes()[:-5])
    files = scalars([file], last_step=4)
    assert read(files["runs/events.out.tfevents.0"], tmp_path / "read")[1] == [(1, 9.0)]


def test_files_of_other_runs_below_the_folder_are_not_its_own(run):
    assert event_files(run.parent) == []
