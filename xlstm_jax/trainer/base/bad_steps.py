"""Handling of bad steps on the host; the device has detected them and not applied their updates."""

import contextlib
import logging
from collections.abc import Iterator

import jax
import numpy as np

from xlstm_jax.common_types import TrainState
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.guard import GuardState
from xlstm_jax.trainer.base.run_metrics import RunMonitor
from xlstm_jax.trainer.logger.base_logger import Logger
from xlstm_jax.trainer.run.progress import Progress

LOGGER = logging.getLogger(__name__)


class BadStepHandler:
    """Looks for bad steps where that costs no time, and does what the policy says.

    Args:
        config: The config of the trainer.
        progress: The progress of the run.
        logger: The logger of the run.
        monitor: Counts bad steps, as of the last row that was logged.
    """

    def __init__(self, config: TrainerConfig, progress: Progress, logger: Logger, monitor: RunMonitor):
        self._policy = config.bad_steps.policy if config.check_for_nan else None
        self._config = config.bad_steps
        self._progress = progress
        self._logger = logger
        self._monitor = monitor
        self._num_seen = 0
        self._batch_of_step: dict[int, int] = {}  # of the steps since the last look

    @property
    def rolls_back(self) -> bool:
        """Whether the run returns to a checkpoint after a bad step."""
        return self._policy == "rollback"

    def is_good(self, guard: GuardState | None) -> bool:
        """Check that no bad step has stopped the state from changing, so that it may be saved. Waits for the device."""
        return guard is None or self._policy == "skip" or int(guard.first_bad) == 0

    def record_batch(self) -> None:
        """Remember which batch the current step is about to use."""
        if self.rolls_back:
            self._batch_of_step[self._progress.step] = self._progress.num_drawn

    def forget_batches(self) -> None:
        """Forget the batches so far: their steps were good."""
        self._batch_of_step.clear()

    def must_stop(self, guard: GuardState | None, *, is_logged: bool, may_wait: bool) -> bool:
        """Check whether the training has to stop or roll back here.

        Args:
            guard: The guard of the train state.
            is_logged: Whether this step was logged, so that the number of bad steps is on the host.
            may_wait: Whether to wait for the device.
        """
        if self._policy is None:
            return False
        if self._policy == "skip":
            if is_logged and self._monitor.num_bad > self._num_seen:
                num_before, self._num_seen = self._num_seen, self._monitor.num_bad
                LOGGER.warning(
                    "%d bad steps were skipped, %d so far.", self._num_seen - num_before, self._monitor.num_bad
                )
            return False
        if is_logged and (self._logger.found_nans or self._monitor.num_bad > self._num_seen):
            return True
        return may_wait and not self.is_good(guard)

    def has_skipped_too_many(self, guard: GuardState | None) -> bool:
        """Check whether the run has skipped a larger share of its steps than allowed, and log it."""
        if guard is None or self._policy != "skip":
            return False
        num_bad, num_steps = int(guard.num_bad), int(guard.num_bad) + int(guard.num_good)
        if num_bad <= self._config.max_skipped_share * num_steps:
            return False
        LOGGER.error(
            "%d of %d steps were bad and skipped, more than bad_steps.max_skipped_share=%g allows: lower the learning "
            "rate, or look at the data.",
            num_bad,
            num_steps,
            self._config.max_skipped_share,
        )
        return True

    def reset(self, state: TrainState) -> TrainState:
        """Return a state that changes again after a bad step."""
        guard = state.guard
        if guard is None:
            return state
        self._num_seen = int(guard.num_bad)
        zeros = jax.tree.map(lambda x: jax.device_put(np.zeros((), x.dtype), x.sharding), guard.first_bad)
        return state.replace(guard=guard._replace(first_bad=zeros))

    @contextlib.contextmanager
    def rollback(self, guard: GuardState) -> Iterator[None]:
        """Skip the batch of the first bad step after the block, which returns the run to its last checkpoint."""
        progress, limit = self._progress, self._config.max_rollbacks
        if progress.num_rollbacks >= limit:
            raise RuntimeError(
                f"The run was rolled back {limit} times and has met a bad step again. Lower the learning rate, look at "
                "the batches named in the log, or raise bad_steps.max_rollbacks."
            )
        bad_step = int(guard.first_bad)
        bad_batch = self._batch_of_step[bad_step]
        skipped, num_rollbacks = progress.skipped_batches | {bad_batch}, progress.num_rollbacks + 1
        yield
        progress.skipped_batches, progress.num_rollbacks = skipped, num_rollbacks
        self._logger.found_nans = False
        self._logger.drop_after(progress.step)
        self._monitor.start(progress.step)
        LOGGER.warning(
            "Step %d was bad: back to step %d, and batch %d is left out.", bad_step, progress.step, bad_batch
        )
