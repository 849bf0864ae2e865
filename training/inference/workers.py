"""Several processes on one task, each with a device of its own: by torchrun, `accelerate launch`, or started here."""

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, patch_environment
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


Result = TypeVar("Result")

# A process waits for the slowest; one that died is noticed by what started them.
PATIENCE = timedelta(days=1)


class Processes:
    """The processes that work together, as one of them sees it; by itself where nothing has started several.

    Args:
        cpu (`bool`): Stay on the CPU where there is an accelerator.

    Attributes:
        rank (`int`), count (`int`): Which of how many this is.
        device (`torch.device`): Its own.

    Raises:
        ValueError: Several were started, but cannot work together on this kind of device.
    """

    def __init__(self, cpu: bool = False):
        cpu = cpu or not torch.accelerator.is_available()
        self.state = PartialState(cpu=cpu, timeout=PATIENCE)
        self.rank, self.count = self.state.process_index, self.state.num_processes
        self.device = torch.device("cpu") if cpu else self.state.device
        if self.count != (started := int(os.environ.get("WORLD_SIZE", 1))):
            raise ValueError(f"{started} processes were started, which cannot work together on {self.device.type}.")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def together(self, work: Callable[[], Result]) -> Result:
        """What `work` returns in this process, once all have done theirs.

        If it raises in some process, all end: the first of them raises its error, the others leave without a word and
        with the status 0, so that whoever started them sees the one that says what is wrong.
        """
        result = error = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        failed = [rank for rank, is_failed in self.gather([(self.rank, error is not None)]) if is_failed]
        if not failed:
            return result
        if error is not None and failed[0] == self.rank:
            raise error
        raise SystemExit(0)

    def gather(self, items: list) -> list:
        """The lists of all processes as one, in the order of their ranks, in every process."""
        return gather_object(items) if self.count > 1 else items

    def end(self) -> None:
        """Part from the others, when all work is done."""
        if self.count > 1:
            self.state.wait_for_everyone()
            self.state.destroy_process_group()


def launch(processes: int, module: str, argv: list[str]) -> None:
    """Run `python -m module argv` in several processes of this machine, by torchrun, and wait for them.

    Each has its share of the threads that this process would have.

    Raises:
        ChildProcessError: A signal ended one of them; the others are ended too.
        SystemExit: One of them failed, and has said why.
    """
    arguments = torchrun.parse_args(["--standalone", "--nproc-per-node", str(processes), "--module", module, *argv])
    try:
        with patch_environment(omp_num_threads=max(1, torch.get_num_threads() // processes)):
            torchrun.run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            raise SystemExit(failure.exitcode) from None
        name = signal.Signals(-failure.exitcode).name
        raise ChildProcessError(f"{name} ended process {rank} of {processes}, and with it the others.") from None
