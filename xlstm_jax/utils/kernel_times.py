"""Profile the GPU kernels of a program."""

import pathlib
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class KernelTime(NamedTuple):
    """The total time and number of calls of a kernel in a program."""

    name: str
    seconds: float
    calls: int


def kernel_times(program: Callable[[], Any]) -> list[KernelTime]:
    """Run a program under the profiler and return its kernels, sorted by time, longest first.

    Args:
        program: A function without arguments that is already compiled; the profile ends when its results are ready.

    Returns:
        The kernels, summed over all GPUs; empty on other devices.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(program())
        (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    nanoseconds, calls = Counter(), Counter()
    for plane in profile.planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            for event in line.events if line.name.startswith("Stream") else ():
                nanoseconds[event.name] += event.duration_ns
                calls[event.name] += 1
    return [KernelTime(name, time / 1e9, calls[name]) for name, time in nanoseconds.most_common()]


def kernel_table(times: list[KernelTime], count: int = 16) -> str:
    """Return a Markdown table of the `count` slowest kernels."""
    total = sum(time.seconds for time in times)
    rows = [f"| {name[:80]} | {1e3 * seconds:.3f} | {calls} |" for name, seconds, calls in times[:count]]
    return "\n".join([f"| of {1e3 * total:.3f} ms in kernels | ms | calls |", "|---|---|---|", *rows])
