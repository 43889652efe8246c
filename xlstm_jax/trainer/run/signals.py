"""Signals that interrupt a run: the current step is finished and saved first.

SIGTERM and SIGINT stop a run; a second SIGINT kills it at once. The exit code is that of the signal: 143 for SIGTERM,
130 for SIGINT. SIGUSR2 stops a run too if a handler is installed, as submitit does for the time limit of a SLURM job:
once the run is saved, that handler is called and may requeue the job. All processes have to stop after the same step.
JAX's coordination service takes care of that for SIGTERM, in whichever process it arrives; for the other signals the
processes synchronise at steps that are logged.
"""

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils

LOGGER = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


class TrainingInterrupted(SystemExit):
    """A signal interrupted the training. The state is saved, and the exit code is that of the signal.

    Args:
        signal_number: The signal.
        step: The last step.
    """

    def __init__(self, signal_number: int, step: int):
        super().__init__(128 + signal_number)
        self.signal_number = signal_number
        self.step = step


class Interrupts:
    """Records the signals that arrive during a run."""

    def __init__(self):
        self._received: int | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator["Interrupts"]:
        """Replace the signal handlers within a block; in other threads than the main one, Python forbids that."""
        self._received = None
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        previous = {number: signal.getsignal(number) for number in self._watched()}
        for number in previous:
            signal.signal(number, self._receive)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            handler = previous.get(signal.SIGUSR2)
            if self._received == signal.SIGUSR2 and callable(handler):
                handler(signal.SIGUSR2, None)

    def received(self, step: int, *, may_wait: bool) -> int | None:
        """Return the signal to stop for, in all processes after the same step; `None` to continue.

        Args:
            step: The number of the step, the same in all processes.
            may_wait: Whether processes may wait for each other, as at steps that are logged.
        """
        if jax.process_count() == 1:
            return self._received
        if multihost_utils.reached_preemption_sync_point(step):
            return signal.SIGTERM
        if may_wait:
            numbers = multihost_utils.process_allgather(np.int32(self._received or 0))
            return int(np.max(numbers)) or None
        return None

    @staticmethod
    def _watched() -> list[signal.Signals]:
        # With several processes, SIGTERM belongs to JAX.
        numbers = SIGNALS if jax.process_count() == 1 else SIGNALS[1:]
        return [number for number in numbers if number != signal.SIGUSR2 or callable(signal.getsignal(number))]

    def _receive(self, number: int, _frame: object) -> None:
        self._received = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # A stream that is being written to when the signal arrives refuses a second write; that needs no traceback.
        raises, logging.raiseExceptions = logging.raiseExceptions, False
        try:
            LOGGER.warning(
                "Received %s: finishing this step, then saving.%s",
                signal.Signals(number).name,
                " Another one ends the run at once." if number == signal.SIGINT else "",
            )
        finally:
            logging.raiseExceptions = raises
