"""The learning rate of the schedule, logged every few steps.

Every training row has the rate `lr` of its update anyway. This callback logs the rate by the number of steps, under
any name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike


@dataclasses.dataclass(kw_only=True, frozen=False)
class LearningRateMonitorConfig(CallbackConfig):
    """When the learning rate is logged, and under which name."""

    every_n_epochs: int = -1
    every_n_steps: int = 50
    main_process_only: bool = True
    log_lr_key: str = "optimizer/lr"
    """Name of the metric."""

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "LearningRateMonitor":
        """Build the callback."""
        return LearningRateMonitor(self, trainer, data_module)


class LearningRateMonitor(Callback):
    """Logs the learning rate that the schedule of the trainer gives for the number of steps so far.

    A small program on the host CPU computes it, so the training devices are neither used nor waited for.

    Args:
        config: When to log.
        trainer: The trainer.
        data_module: The data of the run.
    """

    def __init__(
        self, config: LearningRateMonitorConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None
    ):
        super().__init__(config, trainer, data_module)
        self.config = config
        self._schedule = jax.jit(trainer.lr_scheduler)
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS can leave the CPU out.
            self._device = None

    def on_filtered_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Log the learning rate after a step."""
        self._log_lr(step_idx)

    def on_filtered_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Log the learning rate after an epoch."""
        self._log_lr(self.trainer.global_step)

    def _log_lr(self, step_idx: int) -> None:
        with jax.default_device(self._device):
            lr = float(self._schedule(np.int32(step_idx)))
        self.trainer.logger.log_host_metrics({self.config.log_lr_key: lr}, step_idx, mode="train")
