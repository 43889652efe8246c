"""Drill: a training run that is killed again and again ends with the same numbers as one that was not.

A tiny run is started through the command line and killed at a file operation of a random phase (saving, deleting an
old checkpoint, writing metrics, ...) or at a random time. It is resumed and killed again until it reaches its end; then
its state, its metrics and its validations are compared with those of an uninterrupted run. After each kill, all
checkpoints that are listed must be valid, and the next start must use the newest one.
"""

import contextlib
import csv
import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from drills.interrupted_command import CommandServer, Trap, send
from drills.outcomes import PACKAGE, Outcome, Result, error_of_traceback, show
from etils import epath
from processes import TESTS

from xlstm_jax.checkpoint.orbax import ocp
from xlstm_jax.checkpoint.validity import find_problem

DEADLINE_SECONDS = 180
SHOWN_DIFFERENCES = 5
SETTINGS = (
    "data=text",
    "data.prepare.sources=[poem.txt]",
    "data.prepare.train_vocab_size=null",
    "data.prepare.validation_share=0.3",
    "data.prepare.max_document_bytes=200",
    "data.prepare.num_workers=0",
    "model.embedding_dim=16",
    "model.num_heads=1",
    "model.num_blocks=1",
    "batch_size=2",
    "context_length=16",
    "num_train_steps=48",
    "scheduler.warmup_steps=2",
    "trainer.check_val_every_n_steps=6",
    "trainer.enable_progress_bar=false",
    "logger.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_steps=4",
    "callbacks.checkpoint.max_to_keep=2",
    "performance=manual",
)
PHASES = {
    "settings": (r"config\.|\.hydra", 8),
    "data preparation": (r"/data/", 12),
    "save": (r"checkpoint_\d+\.orbax-checkpoint-tmp", 500),
    "commit": (r"rename .*/checkpoint_\d+\.orbax-checkpoint-tmp[^/]*$|checkpoint_\d+/checksums", 20),
    "metrics of a checkpoint": (r"checkpoint_\d+/(metrics|callbacks|checksums)", 24),
    "deletion": (r"deleted-|rename /checkpoints/checkpoint_\d+$", 400),
    "rows": (r"/file_logs/.*(csv|jsonl)", 80),
    "heartbeat and report": (r"heartbeat|report\.html|environment|parameters", 10),
    "validation": (r"^validation$", 6),
    "any file": (r"", 1000),
}
"""Phases of a run: the operations that belong to it, and how many of them one start has, about."""
TIMES = {"first seconds": (0.0, 5.0), "any time": (2.0, 12.0)}
"""Kills by the clock: seconds after the start."""
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
SIGNALS = {
    "SIGKILL": ([KILL], {-KILL}),
    "SIGTERM": ([TERM], {-TERM, 128 + TERM}),  # Before the training begins, there is nothing to save.
    "SIGINT": ([INT], {-INT, 128 + INT}),
    "two SIGINT": ([INT, INT], {-INT, 128 + INT}),
    "SIGTERM and SIGKILL": ([TERM, KILL], {-KILL, -TERM, 128 + TERM}),
}
"""What is sent, 50 ms apart, and the exit codes that are right; a shell shows negative ones as 128 and more."""
TIMING = re.compile(r"_time$|^startup_|_seconds$")
"""Columns that no two runs have in common."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """When a start is to be ended, and how."""

    phase: str
    signal_name: str
    number: int = 0
    delay: float = 0.0

    @classmethod
    def draw(cls, generator: random.Random, phase: str) -> "Kill":
        """Draw a moment of a phase; two of three kills are SIGKILL."""
        name = generator.choice(["SIGKILL"] * 8 + [name for name in SIGNALS if name != "SIGKILL"])
        if phase in TIMES:
            return cls(phase, name, delay=generator.uniform(*TIMES[phase]))
        delay = generator.choice([0.0, generator.uniform(0, 0.05)])
        return cls(phase, name, generator.randint(1, PHASES[phase][1]), delay)

    def trap(self, folder: Path) -> Trap | None:
        """Return what ends a start in a folder; `None` if that is done by the clock."""
        if self.phase in TIMES:
            return None
        return Trap(str(folder), PHASES[self.phase][0], self.number, SIGNALS[self.signal_name][0], self.delay)

    def __str__(self) -> str:
        if self.phase in TIMES:
            return f"{self.signal_name} after {self.delay:.1f} s ({self.phase})"
        return f"{self.signal_name} {self.delay * 1000:.0f} ms after operation {self.number} of: {self.phase}"


@dataclasses.dataclass
class KilledRun:
    """A run in a folder, which is started until it reaches its end."""

    folder: Path
    server: CommandServer

    @property
    def run(self) -> Path:
        """The folder of the run itself."""
        return self.folder / "run"

    def start(self, kill: Kill | None) -> tuple[int | None, str]:
        """Start or resume the run, end it as told, and return its exit code and what it said; no code if it hangs."""
        self.folder.mkdir(exist_ok=True)
        write_poem(self.folder)
        is_begun = (self.run / "config.yaml").is_file()
        words = ["resume", "run"] if is_begun else ["train", *SETTINGS, f"hydra.run.dir={self.run}"]
        output = self.folder / "output"
        process_id = self.server.start(words, self.folder, output, kill and kill.trap(self.run))
        code = None
        if kill is not None and kill.phase in TIMES:
            code = self.server.wait(kill.delay)
            if code is None:
                send(process_id, SIGNALS[kill.signal_name][0])
        if code is None:
            code = self.server.wait(DEADLINE_SECONDS)
        if code is None:
            os.kill(process_id, signal.SIGKILL)
            self.server.wait(DEADLINE_SECONDS)
        return code, output.read_text()

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are listed."""
        found = (self.run / "checkpoints").glob("checkpoint_*")
        return sorted(int(path.name[11:]) for path in found if path.name[11:].isdecimal())

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the folder between two starts."""
        for step in self.steps():
            if problem := find_problem(epath.Path(self.run) / "checkpoints" / f"checkpoint_{step}"):
                yield f"checkpoint_{step} is listed, but {problem}"
        yield from (f"{path.name} exists" for path in (self.run / "checkpoints").glob("corrupt-*"))

    def leftovers(self) -> list[str]:
        """Return the temporary files of a run that has ended."""
        patterns = ("*.tmp", "*orbax-checkpoint-tmp*", "deleted-*")
        return sorted(str(path.relative_to(self.run)) for pattern in patterns for path in self.run.rglob(pattern))


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the starts: one device, and a cache of compiled programs that they share."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), str(TESTS)]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "COLUMNS": "200",
    }


def write_poem(folder: Path) -> None:
    """Write the text that is trained on."""
    lines = [
        f"On day {day} the ship of {day * 7 % 13} sails had {day * 31 % 17} stars above it.\n" for day in range(150)
    ]
    (folder / "poem.txt").write_text("".join(lines))


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Kill runs `count` times, and compare each of them at its end with an uninterrupted one."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(CommandServer(environment(folder))) as server:
        reference = KilledRun(folder / "reference", server)
        code, said = reference.start(None)
        if code != 0 or "Traceback" in said:
            return [Result("the uninterrupted run", Outcome.TRACEBACK, f"exit code {code}: {said[-500:]}")]
        results: list[Result] = []
        generator = random.Random(seed)
        kills = (Kill.draw(generator, phase) for phase in itertools.cycle([*PHASES, *TIMES]))
        while len(results) < count:
            run = KilledRun(folder / f"run_{len(results)}", server)
            results += kill_and_compare(run, reference, itertools.islice(kills, count - len(results)))
        return results


def kill_and_compare(run: KilledRun, reference: KilledRun, kills: Iterable[Kill]) -> list[Result]:
    """Kill a run as long as it has not come to its end, finish it and compare it with one that was not killed.

    Returns:
        A result for each kill, and one more if the end is not that of the other run.
    """
    results: list[Result] = []
    newest, is_finished = 0, False
    for kill in kills:
        begin = time.monotonic()
        code, said = run.start(kill)
        result = _judge(f"{run.folder.name}: {kill}", kill, code, said, newest, run)
        if result is None:  # The run came to its end before the moment of the kill.
            is_finished = True
            break
        newest = max(run.steps(), default=0)
        seconds = time.monotonic() - begin
        show(f"{result.outcome.value:>14}  {result.case} -> step {newest}, {seconds:.0f} s {result.detail}")
        results.append(result)
    if not is_finished:
        code, said = run.start(None)
    difference = _difference_at_end(run, reference, code, said, newest)
    if difference is None:
        shutil.rmtree(run.folder)
    else:
        results.append(Result(f"{run.folder.name} at its end", *difference))
    show(f"{run.folder.name} at its end: {difference or 'as the uninterrupted run'}")
    return results


def _judge(case: str, kill: Kill, code: int | None, said: str, newest: int, run: KilledRun) -> Result | None:
    """Classify how a start was ended; `None` if it came to its end instead."""
    last = said.strip().splitlines()[-1:] or [""]
    if code is None:
        return Result(case, Outcome.HANG, f"no end after {DEADLINE_SECONDS} s: {last[0]}")
    if "Traceback" in said:
        return Result(case, Outcome.TRACEBACK, error_of_traceback(said))
    if problem := _wrong_start(said, newest) or next(run.problems(), None):
        return Result(case, Outcome.WRONG, problem)
    if code == 0:
        return None
    if code not in SIGNALS[kill.signal_name][1]:
        return Result(case, Outcome.TRACEBACK, f"exit code {code}: {last[0]}")
    if code > 0 and "Stopped" not in said:
        return Result(case, Outcome.WRONG, f"exit code {code} without a word: {last[0]}")
    return Result(case, Outcome.OK if code < 0 else Outcome.REPORTED)


def _wrong_start(said: str, newest: int) -> str | None:
    """Describe where a start began if that is not its newest checkpoint; `None` if it was, or did not come so far."""
    if found := re.search(r"run (?:goes on|resumes) from step (\d+)|run starts", said):
        began = int(found[1] or 0)
        if began != newest:
            return f"it began from step {began}, though there is a checkpoint of step {newest}"
    return None


def _difference_at_end(
    run: KilledRun, reference: KilledRun, code: int | None, said: str, newest: int
) -> tuple[Outcome, str] | None:
    if code is None:
        return Outcome.HANG, f"no end after {DEADLINE_SECONDS} s"
    if code or "Traceback" in said:
        return Outcome.TRACEBACK, f"the last start ends with {code}: {said[-500:]}"
    if problem := _wrong_start(said, newest) or next(run.problems(), None):
        return Outcome.WRONG, problem
    if left := run.leftovers():
        return Outcome.WRONG, f"temporary files are left: {left[:5]}"
    differences = []
    for read in (final_state, documents, rows):
        found, expected = read(run), read(reference)
        differences += [f"{path}: {one} instead of {other}" for path, one, other in find_differences(found, expected)]
    return (Outcome.WRONG, "; ".join(differences[:SHOWN_DIFFERENCES])) if differences else None


def find_differences(found: Any, expected: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield where two nested structures differ, and what is there, from the first to the last place."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in {**expected, **found}:
            yield from find_differences(found.get(key), expected.get(key), f"{path}/{key}")
    elif isinstance(found, list) and isinstance(expected, list):
        for index, (one, other) in enumerate(itertools.zip_longest(found, expected)):
            yield from find_differences(one, other, f"{path}/{index}")
    elif isinstance(found, np.ndarray) and isinstance(expected, np.ndarray):
        if found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
            yield path, str(found)[:50], str(expected)[:50]
    elif found != expected:
        yield path, repr(found)[:100], repr(expected)[:100]


def final_state(run: KilledRun) -> dict[str, Any]:
    """Return all arrays of the last checkpoint by name."""
    checkpoint = epath.Path(run.run) / "checkpoints" / f"checkpoint_{run.steps()[-1]}"
    arrays: dict[str, Any] = {"step of the last checkpoint": run.steps()[-1]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sharding info not provided")  # There is one device, as there was.
        for item in ("params", "opt_state", "guard"):
            for path, leaf in _leaves(ocp.PyTreeCheckpointHandler().restore(checkpoint / item)):
                arrays[f"{item}{path}"] = np.asarray(leaf)
        for item in ("step", "rng"):
            arrays[item] = np.asarray(ocp.ArrayCheckpointHandler().restore(checkpoint / item))
    return arrays


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, branch in tree.items():
            yield from _leaves(branch, f"{path}/{name}")
    else:
        yield path, tree


def documents(run: KilledRun) -> dict[str, Any]:
    """Return what the last checkpoint says about the run and its data, but for the clock, and its metrics."""
    checkpoint = run.run / "checkpoints" / f"checkpoint_{run.steps()[-1]}"
    found = json.loads((checkpoint / "run" / "metadata").read_text())
    found = {name: value for name, value in found.items() if name not in ("clock", "seconds")}
    found["data"] = json.loads((checkpoint / "data" / "metadata").read_text())
    metrics = json.loads((checkpoint / "metrics" / "metrics").read_text())
    found["metrics"] = {name: value for name, value in metrics.items() if not TIMING.search(name)}
    found["callbacks"] = json.loads((checkpoint / "callbacks" / "metadata").read_text())
    return found


def rows(run: KilledRun) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the files of metrics, without empty cells, timing and the system's numbers."""
    logs, found = run.run / "file_logs", {}
    with (logs / "system_train.csv").open(newline="") as file:
        system = set(next(csv.reader(file))) - {"log_step", "log_epoch"}
    for mode in ("train", "val"):
        with (logs / f"metrics_{mode}.csv").open(newline="") as file:
            found[f"metrics_{mode}.csv"] = [_without_timing(row, system) for row in csv.DictReader(file)]
        lines = (logs / f"metrics_{mode}.jsonl").read_text().splitlines()
        found[f"metrics_{mode}.jsonl"] = [_without_timing(json.loads(line), system) for line in lines]
    return {name: [row for row in each if row.keys() - {"log_step", "log_epoch"}] for name, each in found.items()}


def _without_timing(row: dict[str, Any], system: set[str]) -> dict[str, Any]:
    dropped = system | {name for name in row if TIMING.search(name)}
    return {name: value for name, value in row.items() if name not in dropped and value != ""}
