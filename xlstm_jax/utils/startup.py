"""How long a run takes to start, from the start of its process to the end of the first step, phase by phase."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

CONFIG: Any = jax.config
HITS = "/jax/compilation_cache/cache_hits"
COMPILATIONS = "/jax/core/compile/backend_compile_duration"
"""What JAX reports for each program: that it is in the persistent cache, and the time until it could be run."""
PREFIX = "startup_"


class Startup:
    """Divides the time of a start between phases, which follow each other and may come again: each second counts once.

    Until it begins, and after it has finished, nothing is measured.

    Args:
        now: Tells the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._last: float | None = None
        self._phases: dict[str, float] = {}
        self._is_listening = False
        self._num_hits = 0
        self._compilations: list[float] = []

    @property
    def is_running(self) -> bool:
        """Whether it has begun and has not finished."""
        return self._last is not None

    def begin(self, seconds_ago: float = 0.0) -> None:
        """Begin to measure, as if some seconds ago."""
        self._last = self._now() - seconds_ago
        self._phases = {}
        self._num_hits, self._compilations = 0, []
        if not self._is_listening:
            self._is_listening = True
            jax.monitoring.register_event_listener(self._count)
            jax.monitoring.register_event_duration_secs_listener(self._add_compilation)

    def end(self, phase: str) -> None:
        """Count the time since the last phase for this one."""
        if self._last is not None:
            now = self._now()
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
            self._last = now

    def finish(self) -> dict[str, int | float]:
        """Stop measuring, and return as metrics the seconds of all phases, their sum, and those of compilation."""
        if self._last is None:
            return {}
        self._last = None
        return {
            **{f"{PREFIX}{name.replace(' ', '_')}": seconds for name, seconds in self._phases.items()},
            "startup_seconds": sum(self._phases.values()),
            "num_programs": len(self._compilations),
            "compile_seconds": sum(self._compilations),
            **({} if CONFIG.jax_compilation_cache_dir is None else {"num_cache_hits": self._num_hits}),
        }

    def _count(self, event: str, **kwargs: object) -> None:  # noqa: ARG002 - as JAX calls it
        self._num_hits += event == HITS and self.is_running

    def _add_compilation(self, event: str, duration_secs: float, **kwargs: object) -> None:  # noqa: ARG002 - as JAX calls it
        if event == COMPILATIONS and self.is_running:
            self._compilations.append(duration_secs)


STARTUP = Startup()
"""The start of this process, or of the run that it has begun last."""


def describe_startup(metrics: Mapping[str, Any]) -> str:
    """Return in a line what `Startup.finish` has returned."""
    total = "startup_seconds"
    phases = ", ".join(
        f"{name.removeprefix(PREFIX).replace('_', ' ')} {seconds:.1f}"
        for name, seconds in metrics.items()
        if name.startswith(PREFIX) and name != total and seconds >= 0.05
    )
    hits = metrics.get("num_cache_hits")
    cache = "no compilation cache" if hits is None else f"{hits} from the compilation cache"
    programs = f"{metrics['num_programs']} programs compiled in {metrics['compile_seconds']:.1f} s, {cache}"
    return f"startup {metrics[total]:.1f} s: {phases} ({programs})"


def seconds_since_process_start() -> float:
    """Return the age of this process; 0 where the system does not report it."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
