"""Graceful shutdown on signals from a job scheduler or on Ctrl-C, without losing an update."""

import os
import signal
import threading
import time

import torch
from transformers import TrainerCallback


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A launcher forwards the signals that its processes have already received from the terminal: a duplicate within this
# interval does not count as a second signal.
SAME_SIGNAL_SECONDS = 1.0


def ignore_signals(worker: int) -> None:
    """Ignore signals in a data loader worker: the training process may need its data for the last update.

    The worker exits together with the training process.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopOnSignal(TrainerCallback):
    """On SIGTERM, SIGINT or SIGUSR1, finish the update, save a checkpoint and stop the training.

    In distributed training, all processes stop after the same update, no matter which one received the signal. A
    second signal terminates the process immediately.

    The object is both a Trainer callback and a context manager. The signal handlers are installed while the context
    is open, and only in the main thread, because Python delivers signals to no other.

    Attributes:
        received (`int`): Number of the signal that this process received, 0 if none.
        stopped_by (`int`): Number of the signal that stopped the training, 0 until then.
        alone (`bool`): True if the checkpoint is saved only because of the signal and was not due by schedule.
    """

    def __init__(self):
        self.received = self.stopped_by = 0
        self.alone = False
        self._received_at = 0.0
        self._previous_handlers: dict[int, signal.Handlers] = {}
        self._group = None

    def __enter__(self) -> "StopOnSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame) -> None:
        if not self.received:
            self.received, self._received_at = number, time.monotonic()
        elif time.monotonic() - self._received_at > SAME_SIGNAL_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _agreed_signal(self, args) -> int:
        """Agree on the signal that any of the processes received. The exchange runs on the CPU to avoid synchronising
        with the accelerator.
        """
        if args.world_size == 1:
            return self.received
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        number = torch.tensor(self.received)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(number)

    def on_step_end(self, args, state, control, **kwargs):
        if stopped_by := self._agreed_signal(args):
            self.stopped_by, self.alone = stopped_by, not control.should_save
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        """Stop at once if the signal arrived during evaluation or saving: no further update is needed."""
        if stopped_by := self._agreed_signal(args):
            self.stopped_by = stopped_by
            control.should_training_stop = True

    def on_epoch_end(self, args, state, control, **kwargs):
        """Suppress end-of-epoch logging, evaluation and saving if the training was stopped in mid-epoch."""
        if self.stopped_by and state.epoch != int(state.epoch):
            control.should_log = control.should_evaluate = control.should_save = False
        elif control.should_save:
            self.alone = False
