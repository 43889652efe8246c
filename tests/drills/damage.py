"""Drill: damaged checkpoint directories are found, and what was saved before them is used.

A tiny run saves three checkpoints. Each case damages a copy of the newest one, or all of them, in one way, and loads
the run as a resumed training does. The right answers: the run resumes from the checkpoint before, with all of its
numbers and one warning, and the damaged one is renamed; or, where none is left, an error of one line.
"""

import dataclasses
import io
import logging
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import jax
import numpy as np
from drills.interrupted_command import changed_paths
from drills.outcomes import Outcome, Result, judge_output, run_case
from meshes import make_mesh, unboxed_tree
from trainer.runs import SizedTokenLoader, TokenLoader, make_trainer

from xlstm_jax.checkpoint.checksums import CorruptCheckpointError
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.cli.main import main as command_line
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.checkpointing import ModelCheckpoint

STEPS = (2, 4, 6)
NEWEST, BEFORE = STEPS[-1], STEPS[-2]
Damage = Callable[[Path, random.Random], None]
"""Changes a folder: a checkpoint or an item of one."""


def files(folder: Path) -> list[Path]:
    """Return all files below a folder that are not empty."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]


def flip(folder: Path, generator: random.Random) -> None:
    """Flip one bit of one file."""
    file = generator.choice(files(folder) or [folder])
    content = bytearray(file.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    file.write_bytes(content)


def truncate(folder: Path, generator: random.Random) -> None:
    """Cut a file short, as a full disk does."""
    file = generator.choice(files(folder) or [folder])
    file.write_bytes(file.read_bytes()[: generator.randrange(file.stat().st_size)])


def fill_with_zeros(folder: Path, generator: random.Random) -> None:
    """Keep the size of a file and lose its content, as some file systems do when the power fails."""
    file = generator.choice(files(folder) or [folder])
    file.write_bytes(bytes(file.stat().st_size))


def delete_file(folder: Path, generator: random.Random) -> None:
    """Delete a file."""
    generator.choice(files(folder) or [folder]).unlink()


def replace_by_folder(folder: Path, generator: random.Random) -> None:
    """Put a folder where a file was."""
    file = generator.choice(files(folder) or [folder])
    file.unlink()
    file.mkdir()


def replace_by_older(folder: Path, generator: random.Random) -> None:
    """Put the file of the checkpoint before in its place: a valid file, and the wrong one."""
    older = Path(str(folder).replace(f"checkpoint_{NEWEST}", f"checkpoint_{BEFORE}"))
    if folder.is_file():
        shutil.copy(older, folder)
        return
    shutil.rmtree(folder)
    shutil.copytree(older, folder)


def add_file(folder: Path, generator: random.Random) -> None:
    """Add a file."""
    (folder / f"extra_{generator.randrange(100)}").write_bytes(b"1")


def empty(folder: Path, generator: random.Random) -> None:
    """Delete what is in a folder."""
    remove(folder, generator)
    folder.mkdir()


def remove(folder: Path, generator: random.Random) -> None:
    """Delete an item."""
    shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


OF_FILES = (flip, truncate, fill_with_zeros, delete_file, replace_by_folder, replace_by_older)
OF_FOLDERS = (add_file, empty, remove)


@dataclasses.dataclass
class SavedRun:
    """A tiny run with three checkpoints, and the numbers of each."""

    folder: Path
    trainer: Any
    numbers: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path) -> "SavedRun":
        """Train it."""
        checkpoint = ModelCheckpointConfig(every_n_steps=2, max_to_keep=None, monitor="loss")
        trainer = make_trainer(path=folder, check_val_every_n_steps=2, callbacks=[checkpoint])
        mesh = make_mesh()
        loaders = TokenLoader(mesh), SizedTokenLoader(mesh, seed=1, num_batches=1)
        trainer.train_model(*loaders, num_train_steps=NEWEST)
        run = cls(folder, trainer)
        run.numbers = {step: run.load(folder, step) for step in STEPS}
        return run

    @property
    def items(self) -> list[str]:
        """The names of all items of the newest checkpoint, with its list of checksums."""
        newest = self.folder / "checkpoints" / f"checkpoint_{NEWEST}"
        return sorted(path.name for path in newest.iterdir())

    def load(self, folder: Path, step: int = -1) -> dict[str, Any]:
        """Load a run as a resumed training does, and return everything that is restored, by name."""
        config = ModelCheckpointConfig(every_n_steps=2, max_to_keep=None, monitor="loss", log_path=folder)
        callback = ModelCheckpoint(config, self.trainer)
        try:
            state = callback.load_model(step)
            data = callback.load_dataloader(int(state["step"]))
        finally:
            callback.finalize()
        arrays = {name: tree for name, tree in state.items() if name not in ("run", "callbacks")}
        leaves, _ = jax.tree_util.tree_flatten_with_path(unboxed_tree(arrays))
        numbers = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
        return {**numbers, "run": state["run"], "callbacks": state["callbacks"]["states"], "data": data}


@contextmanager
def logged_lines() -> Iterator[list[str]]:
    """Collect the warnings of the package."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("xlstm_jax")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Damage `count` copies of a run, each in another way, and load them."""
    run = SavedRun.create(folder / "run")
    generator = random.Random(seed)
    cases = list(_cases(run.items))
    generator.shuffle(cases)
    results = []
    for index in range(count):
        item, damage = cases[index % len(cases)]
        copy = folder / f"copy_{index}"
        shutil.copytree(run.folder, copy)
        case = f"{damage.__name__} {item}"
        results.append(run_case(case, lambda: _load_damaged(case, run, copy, item, damage, generator)))  # noqa: B023
        shutil.rmtree(copy)
    results += [run_case("all are damaged", lambda: _load_with_none_left(run, folder / "none", generator))]
    results += _interrupted_metrics(run, folder)
    return results + _commands(run, folder, generator)


def _cases(items: list[str]) -> Iterator[tuple[str, Damage]]:
    for item in items:
        is_file = "." in item or item.startswith("_")
        yield from ((item, damage) for damage in (*OF_FILES, remove) if not (is_file and damage is delete_file))
        if not is_file:
            yield from ((item, damage) for damage in (add_file, empty))
    yield from ((".", damage) for damage in (add_file, empty))  # One that was removed as a whole is not missed.


def _newest(folder: Path) -> Path:
    return folder / "checkpoints" / f"checkpoint_{NEWEST}"


def _load_damaged(
    case: str, run: SavedRun, folder: Path, item: str, damage: Damage, generator: random.Random
) -> Result:
    before = {path: path.read_bytes() for path in files(_newest(folder))}
    damage(_newest(folder) / item if item != "." else _newest(folder), generator)
    is_changed = before != {path: path.read_bytes() for path in files(_newest(folder))}
    with logged_lines() as lines:
        numbers = run.load(folder)
    if numbers == run.numbers[NEWEST] and not is_changed:
        return Result(case, Outcome.OK, "nothing was changed")
    if numbers != run.numbers[BEFORE]:
        is_newest = numbers == run.numbers[NEWEST]
        return Result(case, Outcome.WRONG, "it was not noticed" if is_newest else "other numbers were loaded")
    if not (folder / "checkpoints" / f"corrupt-checkpoint_{NEWEST}").is_dir():
        return Result(case, Outcome.WRONG, "the damaged checkpoint is still listed")
    if not any(f"checkpoint_{NEWEST} is corrupt" in line and "\n" not in line for line in lines):
        return Result(case, Outcome.WRONG, f"no warning of one line: {lines}")
    return Result(case, Outcome.REPORTED, lines[0])


def _load_with_none_left(run: SavedRun, folder: Path, generator: random.Random) -> Result:
    case = "all are damaged"
    shutil.copytree(run.folder, folder)
    for step in STEPS:
        flip(folder / "checkpoints" / f"checkpoint_{step}" / "params", generator)
    for _ in range(2):
        try:
            run.load(folder)
            return Result(case, Outcome.WRONG, "it was not noticed")
        except CorruptCheckpointError as error:
            last = str(error)
    return Result(case, Outcome.REPORTED if "\n" not in last else Outcome.TRACEBACK, last)


class StopAt:
    """Raises at the n-th change of a folder, as if the process had ended there."""

    def __init__(self):
        self.folder, self.remaining = "", 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Count a change; hooks cannot be removed, so one without a folder does nothing."""
        if not self.folder:
            return
        for operation in changed_paths(event, arguments):
            if self.folder in operation:
                self.remaining -= 1
                if self.remaining == 0:
                    self.folder = ""
                    raise KeyboardInterrupt

    @contextmanager
    def at(self, folder: Path, number: int) -> Iterator[None]:
        """Stop within this context."""
        self.folder, self.remaining = str(folder), number
        try:
            yield
        finally:
            self.folder = ""


def _interrupted_metrics(run: SavedRun, folder: Path) -> list[Result]:
    """Stop at each file operation of writing metrics into a checkpoint; it must be valid after each of them."""
    stop, results, number = StopAt(), [], 0
    is_interrupted = True
    while is_interrupted:
        number += 1
        case, copy = f"metrics are written, stopped at change {number}", folder / "metrics"
        shutil.copytree(run.folder, copy)
        store = CheckpointStore(copy / "checkpoints", use_async=False)
        before = store.read_document(NEWEST, "metrics")
        store.wait()
        try:
            with stop.at(_newest(copy), number):
                store.save_metrics(NEWEST, {"loss": 1.5})
            is_interrupted = False
        except KeyboardInterrupt:
            pass
        store.close()
        reader = CheckpointStore(copy / "checkpoints", read_only=True)
        problem, found = reader.problem(NEWEST), reader.read_document(NEWEST, "metrics")
        is_right = problem is None and found in (before, {"loss": 1.5}) and run.load(copy) == run.numbers[NEWEST]
        results.append(Result(case, Outcome.OK if is_right else Outcome.WRONG, str(problem or found)))
        shutil.rmtree(copy)
    return results


def _commands(run: SavedRun, folder: Path, generator: random.Random) -> list[Result]:
    """Let `xlstm-jax checkpoints --verify` and `generate` read damaged checkpoints."""
    copy, results = folder / "command", []
    listing = ("checkpoints", str(copy), "--verify")
    generation = ("generate", str(copy), "-p", "a", "--tokenizer", "byte")
    for item in ("params", "opt_state", "metadata", "metrics", "checksums.json", "_CHECKPOINT_METADATA"):
        shutil.copytree(run.folder, copy)
        (copy / "config.yaml").write_text("data: {data_config_type: synthetic}\n")
        flip(_newest(copy) / item, generator)
        pattern = rf"checkpoint_{NEWEST} is corrupt"
        results.append(_command(f"checkpoints --verify, flip {item}", listing, pattern))
        for step in STEPS:
            remove(copy / "checkpoints" / f"checkpoint_{step}" / "params", generator)
        results.append(_command(f"generate without parameters, flip {item}", generation, "corrupt"))
        shutil.rmtree(copy)
    return results


def _command(case: str, words: Sequence[str], pattern: str) -> Result:
    return run_case(case, lambda: judge_output(case, *run_command(*words), {1}, pattern))


def run_command(*words: str) -> tuple[int, str]:
    """Run a command in this process, and return its exit code and what it wrote to stderr."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as errors:
        try:
            code = command_line(list(words))
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, errors.getvalue()
