"""Profiler traces of a few steps at intervals, for TensorBoard or Perfetto."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from xlstm_jax.configs import ConfigError, refuse_ignored
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike

LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, frozen=False)
class JaxProfilerConfig(CallbackConfig):
    """Config of the profiler: the steps to trace."""

    every_n_epochs: int = -1
    every_n_steps: int = -1
    main_process_only: bool = True
    profile_every_n_minutes: int | float = 60
    """The minutes between two traces, and from the start of training to the first; below 0, never."""
    profile_first_step: int = 10
    """The step after which a trace starts; below 1, none."""
    profile_n_steps: int = 5
    """The number of steps of a trace, unless an epoch or a validation ends it."""
    profile_log_dir: str = "tensorboard"
    """The folder of the traces, inside the folder of the run."""

    def __post_init__(self):
        if self.profile_n_steps < 1:
            raise ConfigError(f"profile_n_steps is {self.profile_n_steps}: it has to be 1 or more.")
        own = "on the profiler, which reads profile_every_n_minutes and profile_first_step"
        refuse_ignored(self, dict.fromkeys(("every_n_epochs", "every_n_steps"), own))

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "JaxProfiler":
        """Build the callback."""
        return JaxProfiler(self, trainer, data_module)


class JaxProfiler(Callback):
    """Writes traces to `<log_path>/<profile_log_dir>/plugins/profile`.

    The callback waits for the devices before a trace starts and before it ends, so the trace has exactly its steps. A
    trace ends early before a validation and at the end of the run.

    Args:
        config: Which steps to trace.
        trainer: The trainer. It has to have a `log_path`.
        data_module: The data of the run.
    """

    def __init__(self, config: JaxProfilerConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        super().__init__(config, trainer, data_module)
        if trainer.log_path is None:
            raise ValueError("The profiler has no folder to write to: set `log_path` of the LoggerConfig.")
        self.config = config
        self.log_path = Path(trainer.log_path) / config.profile_log_dir
        self._is_active = not config.main_process_only or jax.process_index() == 0
        self._last_step: int | None = None
        """The last step of the open trace."""
        self._last_time = time.monotonic()

    def on_training_start(self) -> None:
        """Start the timer."""
        self._last_time = time.monotonic()

    def on_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Start or end a trace if due."""
        if self._last_step is not None:
            if step_idx >= self._last_step:
                self.stop_trace()
        elif self._is_active and self._is_due(step_idx):
            self.start_trace(step_idx)

    def on_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """End the trace."""
        self.stop_trace()

    def on_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """End the trace."""
        self.stop_trace()

    def finalize(self, status: str | None = None) -> None:
        """End the trace."""
        self.stop_trace()

    def start_trace(self, step_idx: int) -> None:
        """Trace the steps after this one."""
        self._wait_for_devices()
        self._last_time = time.monotonic()
        try:
            jax.profiler.start_trace(self.log_path)
        except RuntimeError:
            LOGGER.warning("There is no trace after step %d: another one is open.", step_idx, exc_info=True)
            return
        self._last_step = step_idx + self.config.profile_n_steps
        LOGGER.info("Tracing %d steps after step %d to %s.", self.config.profile_n_steps, step_idx, self.log_path)

    def stop_trace(self) -> None:
        """End the trace, if one is open."""
        if self._last_step is None:
            return
        self._last_step = None
        self._wait_for_devices()
        jax.profiler.stop_trace()
        self._last_time = time.monotonic()
        LOGGER.info("The trace is in %s.", self.log_path)

    def _is_due(self, step_idx: int) -> bool:
        minutes = self.config.profile_every_n_minutes
        return step_idx == self.config.profile_first_step or 0 <= 60 * minutes <= time.monotonic() - self._last_time

    def _wait_for_devices(self) -> None:
        # A failed step has donated its state; the next read of the state raises the clearer error.
        with contextlib.suppress(RuntimeError):
            jax.block_until_ready(self.trainer.state.step)
