"""The logger of a run: it fetches metrics from the devices and passes them as rows to logging tools."""

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from xlstm_jax.common_types import HostMetrics, Metrics
from xlstm_jax.configs import ConfigDict, ConfigError, check_numbers
from xlstm_jax.trainer.logger.cmd_logging import LEVELS, setup_logging_multiprocess
from xlstm_jax.trainer.metrics import get_metrics

LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(kw_only=True, frozen=False)
class LoggerToolsConfig(ConfigDict):
    """Base class of the configs of logging tools."""

    target_example: ClassVar[str] = "xlstm_jax.trainer.logger.FileLoggerConfig"
    """An example of the class of a tool, which settings have to name."""

    def create(self, logger: "Logger") -> "LoggerTool":
        """Build the tool that this config describes."""
        raise NotImplementedError(f"{type(self).__name__} has no `create`, which builds its tool.")


@dataclasses.dataclass(kw_only=True, frozen=False)
class LoggerConfig(ConfigDict):
    """Config of the logger: how often and where a run logs."""

    log_every_n_steps: int = 1
    """Log the training metrics every n steps."""
    log_path: Path | None = None
    """The folder of the run; with `None`, no files are written."""
    log_tools: list[LoggerToolsConfig] = dataclasses.field(default_factory=list)
    """The tools that metrics are logged to, such as files or WandB."""
    cmd_logging_name: str = "output"
    """Messages are written to the file of this name in `log_path`, with the suffix `.log`."""
    print_level: str = "WARNING"
    """The lowest level of messages that are printed to stdout; the log file has all levels."""

    def __post_init__(self):
        check_numbers(self, LoggerConfig)
        if self.print_level not in LEVELS:
            raise ConfigError(f"print_level is {self.print_level!r}: choose from {', '.join(LEVELS)}.")
        if self.log_every_n_steps < 1:
            raise ConfigError(f"log_every_n_steps is {self.log_every_n_steps}: it has to be 1 or more.")

    @property
    def log_dir(self) -> str:
        """`log_path` as text; empty if there is none."""
        return "" if self.log_path is None else Path(self.log_path).as_posix()


class LoggerTool:
    """A destination of metrics. Each hook does nothing unless a subclass overrides it."""

    def log_config(self, config: ConfigDict | dict[str, ConfigDict]) -> None:
        """Log the config of the run, or its configs by name."""

    def setup(self) -> None:
        """Prepare for a training run. It may be called for several runs, and after configs or metrics are logged."""

    def drop_after(self, step: int) -> None:
        """Drop the rows after `step`, as the run resumes there and will log those steps again."""

    def drop_step(self, step: int, mode: str) -> None:
        """Drop the rows of a mode at `step`, which are about to be logged again."""

    def log_metrics(self, metrics: dict[str, Any], step: int, epoch: int, mode: str) -> None:
        """Log the metrics of a step. Scalars are Python numbers, others are NumPy arrays or tuples of them."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text, such as a generated sample."""

    def finalize(self, status: str) -> None:
        """Flush pending writes; `status` is `success`, `nan`, `skipped`, `interrupted` or `error`."""


@dataclasses.dataclass(frozen=True)
class _Epoch:
    index: int
    mode: str
    start_time: float
    start_of_steps: float
    """The value of `Logger.step_clock` at the start."""


class Logger:
    """Fetches the metrics of a run every few steps and passes them to all tools.

    A validation within a training epoch is a nested epoch, whose mode is current until it ends. All processes fetch
    metrics and check for NaN, so that all make the same decisions; the tools run in the first process only. A tool that
    fails, for example on a full disk or a lost connection, does not end the run: a warning is logged once for each tool
    and kind of error.

    Args:
        config: How often and where to log; with `None`, steps are never logged and message handlers are unchanged.
        metric_postprocess_fn: Returns the metrics to log from those on the host, for example with added perplexities.

    Attributes:
        log_path: The folder of the run, or `None`.
        log_tools: The tools, none in processes other than the first.
        found_nans: Whether `log_step` has logged a NaN since training started.
        epoch: The index of the current or the last epoch.
        monitors: Functions from a row of `log_step` and its step to further numbers for the row.
        monitored_names: The names of these numbers in the last row.
        step_clock: Returns the seconds that count as step time. The trainer's clock excludes compilation, checkpoints
            and evaluations; by default, only the time of nested epochs is excluded.
    """

    def __init__(
        self, config: LoggerConfig | None, metric_postprocess_fn: Callable[[HostMetrics], HostMetrics] | None = None
    ):
        is_quiet = config is None
        self.config = config = LoggerConfig(log_every_n_steps=sys.maxsize) if config is None else config
        self.metric_postprocess_fn = metric_postprocess_fn
        self.log_path = None if config.log_path is None else Path(config.log_path)
        self.found_nans = False
        self.epoch = 0
        self.monitors: list[Callable[[dict[str, Any], int], Mapping[str, Any]]] = []
        self.monitored_names: set[str] = set()
        self._logged_again: tuple[int | None, set[str]] = None, set()
        self.step_clock: Callable[[], float] = lambda: time.perf_counter()
        self._open_epochs: list[_Epoch] = []
        self._last_log: tuple[float, int] | None = None
        self._reported: set[tuple[int, type[Exception]]] = set()
        if not is_quiet:
            logfile = self.log_path and self.log_path / f"{config.cmd_logging_name}.log"
            setup_logging_multiprocess(logfile, print_level=config.print_level)
        tools = config.log_tools if jax.process_index() == 0 else []
        self.log_tools = [tool.create(self) for tool in tools]

    @property
    def mode(self) -> str:
        """The mode of the current epoch: `train`, `val`, `test` or a task; `default` outside of epochs."""
        return self._open_epochs[-1].mode if self._open_epochs else "default"

    def log_config(self, config: ConfigDict | dict[str, ConfigDict]) -> None:
        """Log the config of the run, or its configs by name, with all tools."""
        for tool in self.log_tools:
            with self._tolerate_errors_of(tool):
                tool.log_config(config)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Log a text, such as a generated sample, with all tools."""
        for tool in self.log_tools:
            with self._tolerate_errors_of(tool):
                tool.log_text(name, text, step)

    def on_training_start(self, step: int | None = None) -> None:
        """Set up all tools and reset `found_nans`.

        Args:
            step: The step that training starts from. Tools that support it drop later rows; with `None`, all rows are
                kept.
        """
        self.found_nans = False
        self._reported.clear()
        if step is not None:
            self.drop_after(step)
        for tool in self.log_tools:
            with self._tolerate_errors_of(tool):
                tool.setup()

    def drop_after(self, step: int) -> None:
        """Drop the rows after a step, in the tools that support it: the run resumes there."""
        for tool in self.log_tools:
            with self._tolerate_errors_of(tool):
                tool.drop_after(step)

    def start_epoch(self, epoch: int, step: int, mode: str = "train") -> None:
        """Start an epoch, possibly nested in another."""
        LOGGER.info("Starting epoch %d at step %d in mode %s.", epoch, step, mode)
        now = self.step_clock()
        if not self._open_epochs:
            self._last_log = (now, step)
        self._open_epochs.append(_Epoch(epoch, mode, time.perf_counter(), now))
        self.epoch = epoch

    def is_due(self, step: int) -> bool:
        """Return whether the metrics of a step are logged."""
        return step % self.config.log_every_n_steps == 0

    def log_step(self, metrics: Metrics | dict[str, Any], step: int) -> Metrics | dict[str, Any]:
        """Log the metrics every `log_every_n_steps` steps.

        The mean seconds per step since the last log, or since `restart_timer`, are added as `step_time`, without the
        time of validations.

        Args:
            metrics: The accumulated metrics on the device.
            step: The number of steps since the start of training, including this one.

        Returns:
            The metrics to continue accumulating with: reset if they were logged, else unchanged.
        """
        if not self.is_due(step):
            return metrics
        LOGGER.info("Logging at step %d in epoch %d in mode %s", step, self.epoch, self.mode)
        metrics, host_metrics = get_metrics(metrics, reset_metrics=True, keep_empty=False)
        host_metrics = {**self._postprocess(host_metrics), "epoch": self.epoch, **self._step_time(step)}
        numbers: dict[str, Any] = {}
        for monitor in self.monitors:
            numbers |= monitor(host_metrics, step)
        self.monitored_names = set(numbers)
        host_metrics |= numbers
        self._check_for_nans(host_metrics, step)
        self.log_host_metrics(host_metrics, step)
        return metrics

    def restart_timer(self, step: int) -> None:
        """Restart the timing of steps after `step` steps, as the first one was mostly compilation."""
        self._last_log = (self.step_clock(), step)

    def log_host_metrics(self, host_metrics: Mapping[str, Any], step: int, mode: str | None = None) -> None:
        """Log numbers on the host, in the current mode by default."""
        host_metrics = {name: _to_host(value) for name, value in host_metrics.items()}
        mode = mode or self.mode
        step_again, modes_again = self._logged_again
        replaces = step == step_again and mode not in modes_again
        modes_again.add(mode)
        for tool in self.log_tools:
            with self._tolerate_errors_of(tool):
                if replaces:
                    tool.drop_step(step, mode)
                tool.log_metrics(host_metrics, step=step, epoch=self.epoch, mode=mode)

    @contextlib.contextmanager
    def logs_again(self, step: int) -> Iterator[None]:
        """Let rows that are logged in this context replace existing rows of the same step and mode.

        It is used to repeat an evaluation that was cut short by a kill, whose rows would be there twice otherwise.
        """
        self._logged_again = step, set()
        try:
            yield
        finally:
            self._logged_again = None, set()

    def end_epoch(
        self, metrics: Metrics | dict[str, Any] | None, step: int
    ) -> tuple[Metrics | dict[str, Any] | None, dict[str, Any]]:
        """End the current epoch and return to the enclosing one.

        Args:
            metrics: The accumulated metrics on the device; `None` if there was no batch.
            step: The number of steps since the start of training.

        Returns:
            The unchanged metrics, and the logged row: the seconds of the epoch as `epoch_time`, and the metrics unless
            the mode is `train`, whose metrics are logged by step.
        """
        if not self._open_epochs:
            raise ValueError("There is no epoch to end: call `start_epoch` first.")
        host_metrics = {}
        if self.mode != "train" and metrics is not None:
            host_metrics = self._postprocess(get_metrics(metrics, reset_metrics=False)[1])
        host_metrics["epoch_time"] = time.perf_counter() - self._open_epochs[-1].start_time
        self.log_host_metrics(host_metrics, step)
        ended = self._open_epochs.pop()
        if self._open_epochs and self._last_log is not None:
            last, last_step = self._last_log
            self._last_log = (last + self.step_clock() - ended.start_of_steps, last_step)
        else:
            self._last_log = None
        self.epoch = self._open_epochs[-1].index if self._open_epochs else self.epoch
        return metrics, host_metrics

    def leave_epoch(self) -> None:
        """End an epoch that a signal has interrupted, without logging a row: the resumed run logs its end."""
        self._open_epochs.pop()

    def finalize(self, status: str) -> None:
        """End the run: `status` is `success`, `nan`, `skipped`, `interrupted` or `error`. Further runs may follow."""
        LOGGER.info("The run ended with status %s.", status)
        self._open_epochs.clear()
        for tool in self.log_tools:
            with self._tolerate_errors_of(tool):
                tool.finalize(status)

    @contextlib.contextmanager
    def _tolerate_errors_of(self, tool: LoggerTool) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            kind = (id(tool), type(error))
            if kind not in self._reported:
                self._reported.add(kind)
                name = type(tool).__name__
                LOGGER.warning(
                    "%s failed, and the run goes on. More of this kind is not reported.", name, exc_info=True
                )

    def _postprocess(self, host_metrics: dict[str, Any]) -> dict[str, Any]:
        return self.metric_postprocess_fn(host_metrics) if self.metric_postprocess_fn else host_metrics

    def _step_time(self, step: int) -> dict[str, float]:
        last_log, self._last_log = self._last_log, (self.step_clock(), step)
        if last_log is None or step <= last_log[1]:
            return {}
        return {"step_time": (self._last_log[0] - last_log[0]) / (step - last_log[1])}

    def _check_for_nans(self, host_metrics: Mapping[str, Any], step: int) -> None:
        names = [name for name, value in host_metrics.items() if _has_nan(value)]
        if names:
            self.found_nans = True
            LOGGER.error("Found NaN at step %s in: %s.", step, ", ".join(names))


def _to_host(value: Any) -> Any:
    if not isinstance(value, np.ndarray | np.generic | jax.Array):
        return value
    array = np.asarray(value)
    return array.item() if array.size == 1 else array


def _has_nan(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_nan, value))
    if not isinstance(value, float | np.ndarray | np.generic | jax.Array):
        return False
    array = np.asarray(value)
    return bool(np.any(array != array))  # Unlike `np.isnan`, this supports arrays of any type.
