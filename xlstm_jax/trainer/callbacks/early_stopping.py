"""Early stopping: ends a run that no longer improves."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from xlstm_jax.configs import ConfigError, refuse_ignored
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike

LOGGER = logging.getLogger(__name__)

Mode = Literal["min", "max"]


@dataclasses.dataclass(kw_only=True, frozen=False)
class EarlyStoppingConfig(CallbackConfig):
    """The metric that has to improve, and how soon."""

    monitor: str
    """A metric of validations, such as `loss`; that of a named set is `<set>_<metric>`."""
    mode: Mode = "min"
    """Whether lower or higher values are better."""
    patience: int = 3
    """The number of validations in a row without improvement after which the run stops."""
    min_delta: float = 0.0
    """The smallest improvement that counts."""

    def __post_init__(self):
        self._check_runs_in_all_processes()
        if self.mode not in get_args(Mode):
            raise ConfigError(f"mode is {self.mode!r}: choose from {', '.join(get_args(Mode))}.")
        if self.patience < 1:
            raise ConfigError(f"patience is {self.patience}: it has to be 1 or more.")
        if self.min_delta < 0:
            raise ConfigError(f"min_delta is {self.min_delta}, but must not be negative.")
        refuse_ignored(self, {"every_n_steps": "on early stopping, which looks at validations"})

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "EarlyStopping":
        """Build the callback."""
        return EarlyStopping(self, trainer, data_module)


class EarlyStopping(Callback):
    """Stops a run after some validations without improvement.

    A metric that is not finite is no improvement. A run that was stopped early and is resumed from its last checkpoint
    stops at once, unless its patience was raised.

    Args:
        config: The metric that has to improve.
        trainer: The trainer.
        data_module: The data of the run.

    Attributes:
        best: The best value so far, or `None`.
        num_without_improvement: The number of validations since then.
    """

    def __init__(self, config: EarlyStoppingConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        super().__init__(config, trainer, data_module)
        self.config = config
        self.best: float | None = None
        self.num_without_improvement = 0

    def on_training_start(self) -> None:
        """Stop a resumed run that is out of patience."""
        self._stop_if_out_of_patience()

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Compare the metric with its best value."""
        monitor = self.config.monitor
        if monitor not in eval_metrics:
            raise ValueError(
                f"Early stopping monitors {monitor!r}, which no validation reports: choose from "
                f"{', '.join(sorted(eval_metrics))}."
            )
        value = float(eval_metrics[monitor])
        if self._is_better(value):
            self.best, self.num_without_improvement = value, 0
        else:
            self.num_without_improvement += 1
        self._stop_if_out_of_patience()

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of validations since then."""
        return {
            "monitor": self.config.monitor,
            "best": self.best,
            "num_without_improvement": self.num_without_improvement,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore from a checkpoint, unless it monitored another metric."""
        is_known = state_dict.get("monitor") == self.config.monitor
        self.best = state_dict["best"] if is_known else None
        self.num_without_improvement = state_dict["num_without_improvement"] if is_known else 0

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.config.mode == "min" else value - self.best
        return gain > self.config.min_delta

    def _stop_if_out_of_patience(self) -> None:
        if self.num_without_improvement >= self.config.patience:
            self.trainer.should_stop = True
            LOGGER.warning(
                "Stopping: %s was no better than %s in %d validations. Raise the patience of early stopping to go on.",
                self.config.monitor,
                self.best,
                self.num_without_improvement,
            )
