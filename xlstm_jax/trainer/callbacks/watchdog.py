"""A watchdog that ends a hanging run, so that it can be restarted instead of blocking its devices."""

import dataclasses
import faulthandler
import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from xlstm_jax.configs import ConfigError, refuse_ignored
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike

LOGGER = logging.getLogger(__name__)

HANG_EXIT_CODE = 75
"""The exit code of a run without a step within its deadline: `EX_TEMPFAIL` of `sysexits.h`, a temporary failure."""
LOOKS_PER_DEADLINE = 20
LONGEST_WAIT_SECONDS = 10.0
REPORT_SECONDS = 30.0
"""The limit for writing a report, as the disk may be what hangs."""
STDERR = 2
"""The file descriptor, as `sys.stderr` may not be a file."""


@dataclasses.dataclass(kw_only=True, frozen=False)
class HangWatchdogConfig(CallbackConfig):
    """The deadlines of a run."""

    deadline_minutes: float = 30.0
    """The time from one step to the next."""
    first_deadline_minutes: float = 60.0
    """The time until the end of the first step, compilation included."""
    validation_deadline_minutes: float | None = None
    """The time from the start of a validation or test to its end, and from there to the next step; by default, the
    deadline of the first step."""

    def __post_init__(self):
        for name in ("deadline_minutes", "first_deadline_minutes", "validation_deadline_minutes"):
            minutes = getattr(self, name)
            if minutes is not None and minutes <= 0:
                raise ConfigError(f"{name} is {minutes}, but has to be positive.")
        inherited = ("every_n_epochs", "every_n_steps", "main_process_only")
        refuse_ignored(self, dict.fromkeys(inherited, "on the watchdog, which watches all steps of all processes"))

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "HangWatchdog":
        """Build the callback."""
        return HangWatchdog(self, trainer, data_module)


class HangWatchdog(Callback):
    """Ends the process with `HANG_EXIT_CODE` if a run hangs.

    The stacks of all threads are written to stderr and to `<log_path>/hang_<pid>.txt` first. Time in which the process
    is suspended does not count. Code that blocks all other threads cannot be detected.

    Args:
        config: The deadlines.
        trainer: The trainer.
        data_module: The data of the run.
    """

    def __init__(self, config: HangWatchdogConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        super().__init__(config, trainer, data_module)
        self._step, self._first = 60 * config.deadline_minutes, 60 * config.first_deadline_minutes
        minutes = config.validation_deadline_minutes
        self._validation = self._first if minutes is None else 60 * minutes
        self._deadline, self._num_signs = self._first, 0
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_training_start(self) -> None:
        """Start the watchdog thread."""
        self.finalize()
        self._has_ended.clear()
        self._see(self._first)
        self._thread = threading.Thread(target=self._watch, name="hang watchdog", daemon=True)
        self._thread.start()

    def on_training_epoch_start(self, epoch_idx: int) -> None:
        """Restart the current deadline."""
        self._see(self._deadline)

    def on_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Start the deadline of the next step."""
        self._see(self._step)

    def on_training_epoch_end(self, train_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Restart the current deadline."""
        self._see(self._deadline)

    def on_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Start the deadline of a validation."""
        self._see(self._validation)

    def on_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Start a deadline for other callbacks after the validation."""
        self._see(self._validation)

    def on_training_end(self) -> None:
        """Start a deadline for loading the checkpoint to test."""
        self._see(self._validation)

    def on_training_interrupted(self, epoch_idx: int, step_idx: int) -> None:
        """Start a deadline for writing a checkpoint."""
        self._see(self._validation)

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Start the deadline of a test."""
        self._see(self._validation)

    def on_test_epoch_end(self, test_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Start a deadline for the end of the run."""
        self._see(self._validation)

    def finalize(self, status: str | None = None) -> None:
        """Stop the watchdog thread."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _see(self, deadline: float) -> None:
        self._deadline = deadline
        self._num_signs += 1

    def _watch(self) -> None:
        shortest = min(self._step, self._first, self._validation)
        wait_seconds = min(shortest / LOOKS_PER_DEADLINE, LONGEST_WAIT_SECONDS)
        num_signs, seconds = self._num_signs, 0.0
        while not self._has_ended.wait(wait_seconds):
            seconds += wait_seconds
            if num_signs != self._num_signs:
                num_signs, seconds = self._num_signs, 0.0
            elif seconds >= self._deadline:
                report = threading.Thread(target=self._report, args=(seconds,), daemon=True)
                report.start()
                report.join(REPORT_SECONDS)
                os._exit(HANG_EXIT_CODE)

    def _report(self, seconds: float) -> None:
        faulthandler.dump_traceback(STDERR)
        LOGGER.critical(
            "Nothing has happened for %.1f s after step %d: the run hangs. Leaving with code %d.",
            seconds,
            self.trainer.global_step,
            HANG_EXIT_CODE,
        )
        if self.trainer.log_path is not None:
            with open(self.trainer.log_path / f"hang_{os.getpid()}.txt", "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
        logging.shutdown()
