"""Measure the startup time of a run, from the start of its process to the end of the first step, by phase."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

CONFIG: Any = jax.config
HITS = "/jax/compilation_cache/cache_hits"
COMPILATIONS = "/jax/core/compile/backend_compile_duration"
"""JAX's monitoring events for each program: a hit in the persistent cache, and the compile time."""
PREFIX = "startup_"


class Startup:
    """A timer that splits the startup time into consecutive phases; a phase can occur several times.

    Nothing is measured before `begin` and after `finish`.

    Args:
        now: A function that returns the time in seconds.
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
        """Whether the timer has started and not finished."""
        return self._last is not None

    def begin(self, seconds_ago: float = 0.0) -> None:
        """Start the timer, as of `seconds_ago`."""
        self._last = self._now() - seconds_ago
        self._phases = {}
        self._num_hits, self._compilations = 0, []
        if not self._is_listening:
            self._is_listening = True
            jax.monitoring.register_event_listener(self._count)
            jax.monitoring.register_event_duration_secs_listener(self._add_compilation)

    def end(self, phase: str) -> None:
        """Add the time since the end of the last phase to this phase."""
        if self._last is not None:
            now = self._now()
            self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
            self._last = now

    def finish(self) -> dict[str, int | float]:
        """Stop the timer; return as metrics the seconds of each phase, their sum, and the compilations."""
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

    def _count(self, event: str, **kwargs: object) -> None:  # noqa: ARG002 - signature required by JAX
        self._num_hits += event == HITS and self.is_running

    def _add_compilation(self, event: str, duration_secs: float, **kwargs: object) -> None:  # noqa: ARG002 - signature required by JAX
        if event == COMPILATIONS and self.is_running:
            self._compilations.append(duration_secs)


STARTUP = Startup()
"""The timer of this process: of its start, or of the run that it started last."""


def describe_startup(metrics: Mapping[str, Any]) -> str:
    """Format the metrics of `Startup.finish` in one line."""
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
    """Return the age of this process in seconds; 0 if the system does not report it."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
