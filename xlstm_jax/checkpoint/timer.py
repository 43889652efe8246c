"""Timer for checkpoints at intervals of time, at the same step in all processes."""

import time
from collections.abc import Callable

import numpy as np
from jax.experimental import multihost_utils


class CheckpointTimer:
    """Determines when the last checkpoint is too old.

    All processes have to save after the same step, so they use the clock of the first one. They read it only at steps
    that all agree on: the next read is after half the steps that are expected to fit into the remaining time.

    Args:
        minutes: The maximum age of a checkpoint; `None` for no limit.
        now: Returns the time in seconds.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic):
        self._limit = None if minutes is None else 60 * minutes
        self._now = now
        self._last_save = now()
        self._last_check: tuple[int, float] | None = None
        self._next_check = 0

    def restart(self) -> None:
        """Start the interval now."""
        self._last_save = self._now()

    def is_due(self, step: int) -> bool:
        """Return whether to save after a step; steps have to increase from call to call."""
        if self._limit is None or step < self._next_check:
            return False
        now = self._now()
        left = self._limit - (now - self._last_save)
        is_due, num_steps = multihost_utils.broadcast_one_to_all(np.array([left <= 0, self._steps_in(left, step, now)]))
        self._last_check = step, now
        self._next_check = step + max(1, int(num_steps) // 2)
        return bool(is_due)

    def _steps_in(self, seconds: float, step: int, now: float) -> int:
        """Estimate the number of steps in a time span, from the duration of the steps since the last check."""
        if self._last_check is None or step <= self._last_check[0]:
            return 0
        seconds_per_step = max((now - self._last_check[1]) / (step - self._last_check[0]), 1e-6)
        return int(max(seconds, 0) / seconds_per_step)
