"""Progress of a run on the console: a live line in a terminal, plain lines elsewhere."""

import atexit
import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from xlstm_jax.trainer.logger.base_logger import Logger, LoggerTool, LoggerToolsConfig
from xlstm_jax.trainer.logger.values import only_numbers
from xlstm_jax.utils.startup import describe_startup

POSTFIXES = ("", "_mean", "_single")
SILENT_MODES = {"dataset", "model", "parallel"}
MOST_RESULTS = 8
MOST_LINES = 8
BAR_WIDTH = 12
PAUSES = ("checkpoint_time", "evaluation_time")
"""Time between steps, which is excluded from the throughput and the remaining time."""
SHORTEST_PAUSE = 0.1
"""Seconds; shorter ones are not shown."""
SEPARATOR = "  "


@dataclasses.dataclass(kw_only=True, frozen=False)
class ConsoleLoggerConfig(LoggerToolsConfig):
    """Config of the console logger."""

    live: bool | None = None
    """Whether to draw a live line below the messages; with `None`, if stdout is a terminal that supports it."""
    references: dict[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte by name to compare evaluations with, such as those of a compressor on the same bytes."""

    def create(self, logger: Logger) -> "ConsoleLogger":
        """Build the tool."""
        return ConsoleLogger(self, logger)


class ConsoleLogger(LoggerTool):
    """Displays the progress, the metrics and the remaining time of training, and the results of each evaluation.

    In a terminal, messages appear above the live line. The line is drawn only when metrics are logged, so steps have no
    overhead. Rows of `train` without any displayed metric are skipped.

    Args:
        config: How to display progress.
        logger: The logger, which is unused.
        console: The console to write to; stdout by default.
    """

    def __init__(self, config: ConsoleLoggerConfig, logger: Logger, console: Console | None = None):
        self.console = console or Console(force_terminal=config.live or None)
        self._references = "".join(f" · {name} {_number(bits)}" for name, bits in config.references.items())
        can_draw = self.console.is_terminal and not self.console.is_dumb_terminal
        self.is_live = can_draw if config.live is None else config.live
        self._live: Live | None = None
        self._num_steps: int | None = None
        self._step_time: float | None = None

    def setup(self) -> None:
        """Reset the length and the speed of an earlier run."""
        self._num_steps = self._step_time = None

    def log_metrics(self, metrics: dict[str, Any], step: int, epoch: int, mode: str) -> None:
        """Display a row."""
        if mode == "dataset":
            self._num_steps = metrics.get("num_train_steps")
        elif mode == "train":
            self._step_time = _find(metrics, "step_time") or self._step_time
            if parts := _describe_training(metrics):
                self._show_progress(step, parts)
        elif mode == "startup":
            self._show_line(describe_startup(metrics))
        elif mode not in SILENT_MODES and (parts := _describe_results(metrics, self._references)):
            self._show_line(SEPARATOR.join([f"{mode} at step {step}", *parts]))

    def log_text(self, name: str, text: str, step: int) -> None:
        """Display the first lines of a text."""
        lines = text.splitlines()
        shown = [f"  │ {line}" for line in lines[:MOST_LINES]] + ["  │ …"] * (len(lines) > MOST_LINES)
        self._show_line("\n".join([f"  {name} at step {step}", *shown]))

    def finalize(self, status: str) -> None:
        """Keep the last state of the live line, and release the terminal."""
        if self._live is not None:
            live, self._live = self._live, None
            atexit.unregister(live.stop)
            live.stop()

    def _place(self, step: int) -> str:
        if not self._num_steps:
            return f"step {step}"
        return f"step {step}/{self._num_steps} ({_percent(step / self._num_steps)})"

    def _time_left(self, step: int) -> list[str]:
        if not self._num_steps or self._step_time is None or not math.isfinite(self._step_time):
            return []
        return [f"ETA {_duration((self._num_steps - step) * self._step_time)}"]

    def _show_progress(self, step: int, parts: list[str]) -> None:
        if not self.is_live:
            self._show_line(SEPARATOR.join([self._place(step), *parts, *self._time_left(step)]))
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
            atexit.register(self._live.stop)
            self.console.show_cursor(True)  # Nothing else would show it if the run is killed.
        bar = [ProgressBar(total=self._num_steps, completed=step, width=BAR_WIDTH)] if self._num_steps else []
        width = self.console.width - (BAR_WIDTH + 1 if bar else 0)
        line = _join_what_fits([self._place(step), *self._time_left(step), *parts], width)
        grid = Table.grid(padding=(0, 1))
        grid.add_row(*bar, Text(line, no_wrap=True, overflow="ellipsis"))
        self._live.update(grid, refresh=True)

    def _show_line(self, line: str) -> None:
        if self.console.is_terminal:
            self.console.print(Text(line))
        else:
            self.console.file.write(f"{line}\n")
            self.console.file.flush()


def _join_what_fits(parts: list[str], width: int) -> str:
    """Join as many of the first parts as fit in a line of this width, at least one."""
    line, *rest = parts
    for part in rest:
        if len(line) + len(SEPARATOR) + len(part) > width:
            break
        line += SEPARATOR + part
    return line


def _find(metrics: Mapping[str, Any], name: str) -> float | None:
    values = (metrics.get(name + postfix) for postfix in POSTFIXES)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


def _describe_training(metrics: Mapping[str, Any]) -> list[str]:
    values = {name: _find(metrics, name) for name in FORMATS}
    pauses = {name for name in PAUSES if (values[name] or 0.0) < SHORTEST_PAUSE}
    return [FORMATS[name](value) for name, value in values.items() if value is not None and name not in pauses]


def _describe_results(metrics: Mapping[str, Any], references: str) -> list[str]:
    results = only_numbers(metrics)
    seconds = results.pop("epoch_time", None)
    shown = [
        (FORMATS[name](value) if name in FORMATS else f"{name} {_number(value)}")
        + (references if name == "bits_per_byte" else "")
        for name, value in list(results.items())[:MOST_RESULTS]
    ]
    return [*shown, f"in {_duration(seconds)}"] if shown and seconds is not None else shown


def _number(value: int | float) -> str:
    is_long = isinstance(value, int) or 1e4 <= abs(value) < 1e7
    return f"{value:.0f}" if is_long else f"{value:#.4g}"


def _short(value: float) -> str:
    for size, unit in [(1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share == 0 or share >= 0.1 else f"{100 * share:.1f} %"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=max(0, round(seconds))))


FORMATS: dict[str, Callable[[int | float], str]] = {
    "loss": lambda value: f"loss {_number(value)}",
    "perplexity": lambda value: f"perplexity {_number(value)}",
    "bits_per_byte": lambda value: f"bits per byte {_number(value)}",
    "tokens_per_second": lambda value: f"tokens/s {_short(value)}",
    "mfu": lambda value: f"MFU {_percent(value)}",
    "mfu_6n": lambda value: f"6N-MFU {_percent(value)}",
    "device_memory_gib": lambda value: f"memory {value:.1f} GiB",
    "checkpoint_time": lambda value: f"checkpoint {value:.1f} s",
    "evaluation_time": lambda value: f"evaluation {value:.1f} s",
}
"""The displayed metrics in order, each with its format."""
