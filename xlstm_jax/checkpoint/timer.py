"""When a checkpoint is due by time, in all processes at the same step."""

import time
from collections.abc import Callable

import numpy as np
from jax.experimental import multihost_utils


class CheckpointTimer:
    """Tells when the last checkpoint is too old.

    Processes have to save after the same step, so they go by the clock of the first one. They ask for it only at steps
    that they agree on: each time, half as many steps ahead as are expected to fit into the time that is left.

    Args:
        minutes: How old a checkpoint may be; `None` for any age.
        now: Tells the time in seconds.
    """

    def __init__(self, minutes: float | None, now: Callable[[], float] = time.monotonic):
        self._limit = None if minutes is None else 60 * minutes
        self._now = now
        self._last_save = now()
        self._last_check: tuple[int, float] | None = None
        self._next_check = 0

    def restart(self) -> None:
        """Count from now on."""
        self._last_save = self._now()

    def is_due(self, step: int) -> bool:
        """Tell whether to save after a step, which has to be above those that were asked about before."""
        if self._limit is None or step < self._next_check:
            return False
        now = self._now()
        left = self._limit - (now - self._last_save)
        is_due, num_steps = multihost_utils.broadcast_one_to_all(np.array([left <= 0, self._steps_in(left, step, now)]))
        self._last_check = step, now
        self._next_check = step + max(1, int(num_steps) // 2)
        return bool(is_due)

    def _steps_in(self, seconds: float, step: int, now: float) -> int:
        """Estimate how many steps fit into a time, by how long those since the last check took."""
        if self._last_check is None or step <= self._last_check[0]:
            return 0
        seconds_per_step = max((now - self._last_check[1]) / (step - self._last_check[0]), 1e-6)
        return int(max(seconds, 0) / seconds_per_step)
