"""The report of a run, written while it trains: `report.html` in its folder."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from xlstm_jax.configs import ConfigError, refuse_ignored
from xlstm_jax.report.environment import record_end, record_parameters, record_start
from xlstm_jax.report.page import write_report
from xlstm_jax.report.run_files import read_run
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike

LOGGER = logging.getLogger(__name__)

SLOW_SECONDS = 1.0
"""Reports that take less time are written after every validation."""
LARGEST_SHARE = 0.02
"""The share of the time of a run that slower reports may take."""


@dataclasses.dataclass(kw_only=True, frozen=False)
class RunReportConfig(CallbackConfig):
    """When the report is written, and the references that it shows."""

    main_process_only: bool = True
    references: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte by name, such as those of compressors; each is drawn as a line."""

    def __post_init__(self):
        bad = {name: value for name, value in self.references.items() if not math.isfinite(value) or value <= 0}
        if bad:
            raise ConfigError(f"references has {bad}: bits per byte have to be finite and positive.")
        after_validations = "on the report, which the first process writes after validations"
        refuse_ignored(self, dict.fromkeys(("every_n_steps", "main_process_only"), after_validations))

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "RunReport":
        """Build the callback."""
        return RunReport(self, trainer, data_module)


class RunReport(Callback):
    """Writes `environment.json` and `parameters.json` when training starts, and `report.html` after validations.

    Only the first process writes. Put this callback after those whose files it shows, such as samples. A failure does
    not end the run and is logged once. Without a folder of the run, nothing is written.

    Args:
        config: When to write, and the references.
        trainer: The trainer.
        data_module: The data of the run.
    """

    def __init__(self, config: RunReportConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        super().__init__(config, trainer, data_module)
        self.config = config
        self._folder = trainer.log_path if jax.process_index() == 0 else None
        self._has_started = self._has_failed = False
        self._last_end, self._last_seconds = -math.inf, 0.0

    def on_training_start(self) -> None:
        """Record the environment and the parameters of the run."""
        self._has_started = True
        step, references = self.trainer.global_step, self.config.references
        self._try(lambda folder: record_start(folder, step=step, references=references))
        self._try(lambda folder: record_parameters(folder, self.trainer.state.params))

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Write the report, unless reports take too large a share of the time."""
        pause = 0.0 if self._last_seconds < SLOW_SECONDS else self._last_seconds / LARGEST_SHARE
        if time.monotonic() - self._last_end >= pause:
            self._try(self._write)

    def finalize(self, status: str | None = None) -> None:
        """Write the final report of the run, if training was started."""
        if not self._has_started:
            return
        self._has_started = False
        self._try(lambda folder: record_end(folder, status=status or "success"))
        self._try(self._write)

    def _write(self, folder: Path) -> None:
        start = time.monotonic()
        write_report([read_run(folder)], folder / "report.html")
        self._last_end = time.monotonic()
        self._last_seconds = self._last_end - start

    def _try(self, write: Callable[[Path], None]) -> None:
        if self._folder is None:
            return
        try:
            write(self._folder)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                LOGGER.warning("The report could not be written; the run goes on.", exc_info=True)
