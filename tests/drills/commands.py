"""Drill: bad commands end with the documented exit code and a few clear lines, and leave nothing behind."""

import contextlib
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

from drills.bad_commands import BAD_COMMANDS, FILES
from drills.damage import run_command
from drills.outcomes import Result, judge_output, run_case

REST_OF_USAGE = re.compile(r"^\s")
"""Lines of a usage after its first, which argparse writes before what is wrong."""


def drill(folder: Path, *, count: int, seed: int = 0) -> list[Result]:
    """Run up to `count` bad commands in a folder with `FILES`, drawn from all."""
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    cases = BAD_COMMANDS
    if count < len(cases):
        cases = random.Random(seed).sample(cases, count)
    with contextlib.chdir(folder), _without_training():
        return [run_case(_name(words), lambda: _judge(words, code, part)) for words, code, part in cases]  # noqa: B023


@contextlib.contextmanager
def _without_training() -> Iterator[None]:
    """Let a run that is started end at once, with exit code 0: all of these commands are refused before."""
    with contextlib.ExitStack() as patches:
        for command in ("train", "resume"):
            patches.enter_context(mock.patch(f"xlstm_jax.cli.{command}.train_in", return_value=0))
        yield


def _judge(words: Sequence[str], code: int, part: str) -> Result:
    found, output = run_command(*words)
    lines = [line for line in output.splitlines() if not REST_OF_USAGE.match(line)]
    return judge_output(_name(words), found, "\n".join(lines), {code}, re.escape(part))


def _name(words: Sequence[str]) -> str:
    return " ".join(["xlstm-jax", *words])
