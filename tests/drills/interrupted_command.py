"""Commands of xlstm-jax that send themselves a signal at a chosen file operation.

Python reports every file that is opened for writing, renamed or deleted to audit hooks *before* it happens, so a
process can be ended between any two changes of its folder without any change of the package.

As a script, this is a server that starts commands. For each request it forks itself, as it has imported everything
already, which takes most of the time of a start: `CommandServer` talks to it.
"""

import contextlib
import dataclasses
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
VALIDATION = "drills.validation"
CHANGES = {"os.rename": "rename", "os.remove": "remove", "os.rmdir": "rmdir", "os.mkdir": "mkdir"}


def changed_paths(event: str, arguments: tuple[Any, ...]) -> Iterator[str]:
    """Yield `<operation> <path>` for what an audit event is about to change; nothing for other events."""
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str) and flags & WRITING:
            yield f"write {path}"
    elif event in CHANGES:
        folder = arguments[2] if event == "os.mkdir" else arguments[1]
        path = os.fspath(arguments[0])
        if event != "os.rename" and isinstance(folder, int) and folder >= 0:
            path = f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}"
        yield f"{CHANGES[event]} {path}"


@dataclasses.dataclass
class Trap:
    """Ends the process at the n-th operation inside a folder that matches a pattern, or a moment after it.

    A validation touches no file; it counts as the operation `validation`.
    """

    folder: str
    pattern: str
    number: int
    signals: Sequence[int]
    """What the process sends itself, 50 ms apart."""
    delay: float = 0.0
    """Seconds between the operation and the first signal."""

    def __post_init__(self):
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Look at an audit event."""
        for operation in ["validation"] if event == VALIDATION else changed_paths(event, arguments):
            is_inside = event == VALIDATION or self.folder in operation
            if is_inside and re.search(self.pattern, operation.replace(self.folder, "")):
                with self.lock:
                    self.count += 1
                    is_due = self.count == self.number
                if is_due and self.delay:
                    threading.Thread(target=self.end, daemon=True).start()
                elif is_due:
                    self.end()

    def end(self) -> None:
        """Send the signals."""
        time.sleep(self.delay)
        send(os.getpid(), self.signals)


def send(process_id: int, signals: Sequence[int]) -> None:
    """Send signals to a process, 50 ms apart, unless it has ended."""
    for index, number in enumerate(signals):
        if index:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, number)


class CommandServer:
    """Starts commands in forks of a process that has imported everything.

    Args:
        environment: The environment of all commands.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, words: Sequence[str], folder: Path, output: Path, trap: Trap | None = None) -> int:
        """Start a command in a folder, with what it prints in a file, and return the id of its process."""
        request = {"words": list(words), "folder": str(folder), "output": str(output)}
        request["trap"] = trap and dataclasses.asdict(trap)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._read_line())

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of the command, negative for a signal; `None` if it has not ended after some time."""
        is_there, _, _ = select.select([self._process.stdout], [], [], seconds)
        return int(self._read_line()) if is_there else None

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        self._process.communicate()

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "The server of commands has ended."
        return line


def serve() -> int:
    """Start a command for each line of stdin; print the id of its process and then its exit code."""
    import_all()
    for line in iter(sys.stdin.readline, ""):
        process_id = os.fork()
        if not process_id:
            return run(json.loads(line))
        answer(process_id)
        _, status = os.waitpid(process_id, 0)
        answer(os.waitstatus_to_exitcode(status))
    return 0


def answer(number: int) -> None:
    """Print a number at once."""
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def import_all() -> None:
    """Import what `train` and `resume` need; JAX looks for devices only after the fork."""
    import xlstm_jax.cli.resume
    import xlstm_jax.cli.train  # noqa: F401 - for the forks
    from xlstm_jax.trainer.base.trainer import TrainerModule

    evaluate = TrainerModule.eval_model

    def announced(*args: Any, **kwargs: Any) -> Any:
        sys.audit(VALIDATION)
        return evaluate(*args, **kwargs)

    TrainerModule.eval_model = announced


def run(request: Mapping[str, Any]) -> int:
    """Run a command in a fork of the server."""
    log = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate([os.open(os.devnull, os.O_RDONLY), log, log]):
        os.dup2(file, number)
    os.chdir(request["folder"])
    if request["trap"] is not None:
        sys.addaudithook(Trap(**request["trap"]))
    sys.argv = ["xlstm-jax", *request["words"]]
    from xlstm_jax.cli.main import main

    return main(request["words"])


if __name__ == "__main__":
    sys.exit(serve())
