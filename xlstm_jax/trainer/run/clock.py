"""Accounting of the wall time of a run by activity, restarts included."""

import contextlib
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xlstm_jax.utils.files import write_atomically

LOGGER = logging.getLogger(__name__)

USEFUL = "step"
"""Useful steps: the time that no other activity claims."""
ACTIVITIES = ("compile", "data", "checkpoint", "evaluation", "restart")
HEARTBEAT_SECONDS = 1.0


@dataclasses.dataclass
class Span:
    """A span of time; its activity may be changed until it ends."""

    activity: str
    seconds: float = 0.0


class Clock:
    """Divides the time of a run between activities, each second counted once.

    Before it is started, and after it is stopped, only activities are counted.

    Args:
        now: Returns the time in seconds.

    Attributes:
        id: Distinguishes this clock from those of other starts of the run.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.id = uuid.uuid4().hex
        self._now = now
        self._seconds: dict[str, float] = {name: 0.0 for name in (USEFUL, *ACTIVITIES)}  # noqa: C420 - typed as str
        self._open = [Span(USEFUL)]
        self._last = now()
        self._is_running = False

    @contextlib.contextmanager
    def measure(self, activity: str) -> Iterator[Span]:
        """Count the time of a block for an activity; nested blocks are counted for their own activities."""
        self._charge()
        self._open.append(span := Span(activity))
        try:
            yield span
        finally:
            self._charge()
            self._open.pop()
            self._seconds[span.activity] = self._seconds.get(span.activity, 0.0) + span.seconds

    def start(self) -> None:
        """Start counting unclaimed time as useful."""
        self._charge()
        self._is_running = True

    def stop(self) -> None:
        """Stop counting unclaimed time as useful."""
        self._charge()
        self._is_running = False

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each activity that has ended, and of useful steps."""
        self._charge()
        return self._seconds | {USEFUL: self._seconds[USEFUL] + self._open[0].seconds}

    @property
    def training_seconds(self) -> float:
        """The seconds of steps and of waiting for data, without compilation, checkpoints, evaluation and restarts."""
        seconds = self.seconds
        return seconds[USEFUL] + seconds["data"]

    @property
    def elapsed(self) -> float:
        """The seconds of all activities."""
        return sum(self.seconds.values())

    def shares(self) -> dict[str, float]:
        """Return the share of useful steps as `goodput`, and that of each other activity as `lost_<activity>`."""
        seconds = self.seconds
        total = sum(seconds.values()) or 1.0
        lost = {f"lost_{name}": value / total for name, value in seconds.items() if name != USEFUL}
        return {"goodput": seconds[USEFUL] / total, **lost}

    def resume(self, seconds: Mapping[str, float], *, lost: float) -> None:
        """Continue from the seconds in a checkpoint.

        Args:
            seconds: The seconds of each activity at the checkpoint.
            lost: The seconds between the checkpoint and now; they are counted as a restart.
        """
        self._charge()
        self._open[0].seconds = 0.0
        self._seconds = dict.fromkeys(self._seconds, 0.0) | dict(seconds)
        self._seconds["restart"] += lost

    def _charge(self) -> None:
        """Count the time since the last call for the innermost open span."""
        now = self._now()
        if self._is_running or len(self._open) > 1:
            self._open[-1].seconds += now - self._last
        self._last = now


class Heartbeat:
    """A small file with the progress of a run, for monitoring and for the next start of the run.

    Args:
        path: The file; `None` for no file.
    """

    def __init__(self, path: Path | None):
        self.path = path
        self._last = -HEARTBEAT_SECONDS

    def beat(self, step: int, elapsed: float) -> None:
        """Write the step and the seconds of the run, at most once a second."""
        now = time.monotonic()
        if self.path is None or now - self._last < HEARTBEAT_SECONDS:
            return
        self._last = now
        content = json.dumps({"step": step, "elapsed": elapsed, "time": time.time()})
        try:
            write_atomically(self.path, content, durable=False)
        except OSError as error:  # A full disk does not end a run.
            LOGGER.warning("%s could not be written, and is not tried again: %s", self.path, error)
            self.path = None

    def read(self) -> dict[str, Any]:
        """Return the last content; empty if there is no such file."""
        try:
            return json.loads(self.path.read_text()) if self.path else {}
        except (OSError, ValueError):
            return {}
