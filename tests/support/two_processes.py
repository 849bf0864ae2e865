"""A command in two processes, which find each other as torchrun's do."""

import os
from pathlib import Path

from support.killed_output import kill_after_ten_lines
from support.warm import WARM
from training.cli import main
from training.inference import search


def _fail(*args) -> None:
    raise OSError("rank 1 has no memory left")


def _process(rank: int, port: str, errors: Path, action: str, words: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if action == "kill":
        kill_after_ten_lines()
    if action == "fail" and rank == 1:
        search.Search.__call__ = _fail
    os._exit(main(words))


def run_two(port: str, errors: Path, action: str, words: list[str]) -> list[int]:
    """Exit codes of both; the action is `run`, `kill`, of the first after ten lines, or `fail`, of the second.

    Args:
        errors: File to which what they print to the standard error is appended.
    """
    pair = [WARM.Process(target=_process, args=(rank, port, errors, action, words), daemon=True) for rank in (0, 1)]
    for member in pair:
        member.start()
    pair[0].join(300)
    if pair[0].exitcode < 0:  # torchrun would end the other
        pair[1].kill()
    pair[1].join(300)
    return [member.exitcode for member in pair]
