"""What became of each case of a drill, as a table that people read and an exit code that programs read."""

import collections
import contextlib
import dataclasses
import io
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import xlstm_jax

PACKAGE = Path(xlstm_jax.__file__).parent
SECONDS_PER_CASE = 60
MAX_LINES = 3


class Outcome(Enum):
    """How a case ended; the last three are faults of the project."""

    OK = "ok"
    """The right result."""
    REPORTED = "reported"
    """One clear line (or a few), and a documented exit code or an exception that explains itself."""
    TRACEBACK = "traceback"
    """An error that says nothing to users: a traceback, or an exception from deep inside another library."""
    HANG = "hang"
    WRONG = "silently wrong"
    """No error, and a wrong result."""


FAULTS = (Outcome.TRACEBACK, Outcome.HANG, Outcome.WRONG)


@dataclasses.dataclass(frozen=True)
class Result:
    """One case of a drill and its outcome."""

    case: str
    outcome: Outcome
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether the project has to be fixed."""
        return self.outcome in FAULTS


class HangError(BaseException):
    """A case took too long. Not an `Exception`, so that no library drops it."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a case that hangs; only Python code in the main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise HangError

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def run_case(case: str, run: Callable[[], Result]) -> Result:
    """Run a case; an error that it does not expect is a traceback, and one that takes too long hangs."""
    try:
        with time_limit(SECONDS_PER_CASE), contextlib.redirect_stdout(io.StringIO()):
            return run()
    except HangError:
        return Result(case, Outcome.HANG, f"no result after {SECONDS_PER_CASE} s")
    except Exception as error:
        return Result(case, Outcome.TRACEBACK, describe_error(error))


def describe_error(error: BaseException) -> str:
    """Return the type of an error, the first line of its message and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}{place}"


def raised_by_the_package(error: BaseException) -> bool:
    """Tell whether an error was raised by a line of xlstm_jax, not by a library that it calls."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(PACKAGE)


def error_of_traceback(output: str) -> str:
    """Return the line that ends the first traceback of an output: the error."""
    _, _, rest = output.partition("Traceback")
    return next((line for line in rest.splitlines()[1:] if line[:1].strip()), "")


def judge_output(case: str, code: int, output: str, codes: Iterable[int], pattern: str = "") -> Result:
    """Classify what a command printed about an error.

    Args:
        case: The name of the case.
        code: The exit code.
        output: What the command wrote to stderr.
        codes: The exit codes that are right.
        pattern: A regular expression that the message must match.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    if "Traceback" in output:
        return Result(case, Outcome.TRACEBACK, error_of_traceback(output))
    if code not in codes:
        outcome = Outcome.WRONG if code == 0 else Outcome.TRACEBACK
        return Result(case, outcome, f"exit code {code}, not {sorted(codes)}: {last}")
    if code == 0:
        return Result(case, Outcome.OK)
    if not lines or len(lines) > MAX_LINES:
        return Result(case, Outcome.TRACEBACK, f"{len(lines)} lines, not 1 to {MAX_LINES}: {last}")
    if not re.search(pattern, output):
        return Result(case, Outcome.TRACEBACK, f"the message does not contain {pattern!r}: {last}")
    return Result(case, Outcome.REPORTED, last)


def table(drills: dict[str, list[Result]]) -> str:
    """Return a table with a row for each drill, and a line for each fault below it."""
    heads = ["drill", "cases", *(outcome.value for outcome in Outcome)]
    rows = []
    for drill, results in drills.items():
        counts = collections.Counter(result.outcome for result in results)
        rows.append([drill, str(len(results)), *(str(counts[outcome]) for outcome in Outcome)])
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [heads, *rows]]
    for drill, results in drills.items():
        lines += [f"{drill}: {each.case}: {each.outcome.value}: {each.detail}" for each in results if each.is_fault]
    return "\n".join(lines)


def faults(results: Iterable[Result]) -> list[str]:
    """Return a line for each result that is a fault."""
    return [f"{result.case}: {result.outcome.value}: {result.detail}" for result in results if result.is_fault]


def show(text: Any) -> None:
    """Print at once, also into a file."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
