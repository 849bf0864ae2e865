"""Data-parallel inference in several processes, started by torchrun, `accelerate launch` or `launch`."""

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

# Processes wait for the slowest. The launcher, not this timeout, detects a process that died.
TIMEOUT = timedelta(days=1)


class Processes:
    """Process group of a command, as seen by one of its processes. A process without a launcher is a group of one.

    Args:
        cpu (`bool`): Use the CPU even if there is an accelerator.

    Attributes:
        rank (`int`): Rank of this process.
        count (`int`): Number of processes.
        device (`torch.device`): Device of this process.

    Raises:
        ValueError: Several processes were started, but they cannot communicate on this type of device.
    """

    def __init__(self, cpu: bool = False):
        cpu = cpu or not torch.accelerator.is_available()
        self.state = PartialState(cpu=cpu, timeout=TIMEOUT)
        self.rank, self.count = self.state.process_index, self.state.num_processes
        self.device = torch.device("cpu") if cpu else self.state.device
        if self.count != (started := int(os.environ.get("WORLD_SIZE", 1))):
            raise ValueError(f"{started} processes were started, but they cannot communicate on {self.device.type}.")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def together(self, work: Callable[[], Result]) -> Result:
        """Run `work` in all processes, wait for all of them, and return the result of this process.

        If `work` raises in any process, all processes exit. The lowest-ranked failed process raises its error. The
        others exit silently with status 0, so that the launcher reports that one error.
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
        """Concatenate the lists of all processes in the order of their ranks. Every process gets the result."""
        return gather_object(items) if self.count > 1 else items

    def end(self) -> None:
        """Wait for all processes, then destroy the process group."""
        if self.count > 1:
            self.state.wait_for_everyone()
            self.state.destroy_process_group()


def launch(processes: int, module: str, argv: list[str]) -> None:
    """Run `python -m module argv` in several processes on this machine by torchrun, and wait for them.

    The threads of this process are divided equally among them.

    Raises:
        ChildProcessError: A signal killed one of the processes; the others are terminated too.
        SystemExit: One of the processes failed, after printing its error.
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
        raise ChildProcessError(f"{name} killed process {rank} of {processes}; the others were terminated.") from None
