"""Being asked to stop, by a job scheduler or by Ctrl-C, without losing an update."""

import os
import signal
import threading
import time

import torch
from transformers import TrainerCallback


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher hands on to its processes what they have got from the terminal already: that is no second signal.
SAME_SIGNAL_SECONDS = 1.0


def ignore_signals(worker: int) -> None:
    """For the processes that read data: they end with the one that trains, which may need them for its last update."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopOnSignal(TrainerCallback):
    """On SIGTERM, SIGINT or SIGUSR1: finish the update, write a checkpoint, and end the training; in several processes
    all after the same update, whichever of them got the signal. A second signal ends the process at once.

    A callback for the Trainer, and a context manager that listens as long as it is open (in the main thread: others
    get no signals). `stopped_by` is the signal's number once the training ends because of it, 0 before.
    """

    def __init__(self):
        self.received = self.stopped_by = 0
        self.alone = False
        self._since = 0.0
        self._before: dict[int, signal.Handlers] = {}
        self._group = None

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if not self.received:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _agreed(self, args) -> int:
        """The signal that any process has got. Asked over the CPU, so that no accelerator is waited for."""
        if args.world_size == 1:
            return self.received
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        number = torch.tensor(self.received)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(number)

    def on_step_end(self, args, state, control, **kwargs):
        if stopped_by := self._agreed(args):
            self.stopped_by, self.alone = stopped_by, not control.should_save
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        """What was received while evaluating or writing the checkpoint needs no further update."""
        if stopped_by := self._agreed(args):
            self.stopped_by = stopped_by
            control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        """In the middle of an epoch, which the Trainer ends here, nothing is due that is due at its end."""
        if self.stopped_by and state.epoch != int(state.epoch):
            control.should_log = control.should_evaluate = control.should_save = False
        elif control.should_save:
            self.alone = False
