"""When a run is validated: at steps, after epochs and at its end. A step is validated once."""

import logging
from typing import Any

from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.run.progress import Progress

LOGGER = logging.getLogger(__name__)


class ValidationSchedule:
    """Decides when a run is validated.

    Args:
        config: The config of the trainer.
        progress: The progress of the run.
    """

    def __init__(self, config: TrainerConfig, progress: Progress):
        self._config = config
        self._progress = progress
        self._metrics: dict[str, Any] = {}

    def is_due_at_step(self, *, is_end: bool) -> bool:
        """Check whether the current step is validated.

        Args:
            is_end: Whether it is the last step of the run.
        """
        config = self._config
        is_validated = config.check_val_every_n_steps > 0 or config.check_val_every_n_epoch > 0
        at_end = config.check_val_at_end and is_validated and is_end
        return _is_due(self._progress.step, config.check_val_every_n_steps) or at_end

    def is_due_after_epoch(self, epoch_idx: int) -> bool:
        """Check whether the run is validated after an epoch."""
        return _is_due(epoch_idx, self._config.check_val_every_n_epoch)

    def record(self, metrics: dict[str, Any]) -> None:
        """Remember the metrics of the current step."""
        self._progress.validated_step, self._metrics = self._progress.step, metrics

    def forget(self) -> None:
        """Forget the metrics of the last validation: the run has another state."""
        self._metrics = {}

    def find(self, epoch_idx: int) -> dict[str, Any] | None:
        """Return the metrics of the current step if it was validated, also if that was before the run was resumed.

        Args:
            epoch_idx: The epoch that the metrics are needed for.
        """
        if self._progress.validated_step != self._progress.step:
            return None
        LOGGER.warning("Step %d was validated already: epoch %d has its metrics.", self._progress.step, epoch_idx)
        return self._metrics


def _is_due(index: int, every: int) -> bool:
    return every > 0 and index % every == 0
