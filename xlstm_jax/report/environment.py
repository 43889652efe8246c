"""Record the environment and the parameters of a run for its report."""

import contextlib
import datetime
import json
import math
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.report.run_files import ENVIRONMENT_FILE, PARAMETERS_FILE
from xlstm_jax.utils.files import write_atomically
from xlstm_jax.utils.partitioned import is_partitioned, partition_names, unboxed
from xlstm_jax.utils.pytree_utils import flatten_pytree
from xlstm_jax.version import __version__

PROGRAM = "xlstm-jax"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "hydra-core", "tokenizers", "numpy")
GIT_SECONDS = 10.0
"""The timeout of git commands, as the repository may be on a slow disk."""


def describe_environment() -> dict[str, Any]:
    """Return the versions, git commit, devices, command and current time of this process."""
    devices = jax.devices()
    return {
        "time": _now(),
        "command": command_as_typed(sys.orig_argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {"xlstm_jax": __version__, **_versions()},
        "git": describe_git(),
        "devices": {"kind": devices[0].device_kind, "count": len(devices), "processes": jax.process_count()},
    }


def command_as_typed(argv: Sequence[str]) -> list[str]:
    """Return the command line of a process as a user would type it, with the name of the program instead of its path.

    Args:
        argv: The original arguments of the interpreter, `sys.orig_argv`: `sys.argv` lacks some, and Hydra changes it.
    """
    interpreter, *words = argv
    if words[:2] == ["-m", "xlstm_jax.cli.main"]:
        return [PROGRAM, *words[2:]]
    if words and Path(words[0]).name == PROGRAM:
        return [PROGRAM, *words[1:]]
    return [Path(interpreter).name, *words]


def describe_git(folder: Path | None = None) -> dict[str, Any] | None:
    """Return the commit of a folder, by default the current one, and whether tracked files have changed.

    Returns:
        `commit` and `dirty`, which is `None` if git fails to report it; `None` outside a repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def describe_parameters(params: PyTree) -> list[dict[str, Any]]:
    """Return the name, shape, dtype, partition spec and size of every parameter, sorted by name."""
    leaves = flatten_pytree(params, is_leaf=is_partitioned)
    return [
        _describe_parameter(name, leaves[name]) for name in sorted(leaves) if hasattr(unboxed(leaves[name]), "shape")
    ]


def record_start(folder: Path, *, step: int, references: Mapping[str, float]) -> None:
    """Append a start of the run to `environment.json`.

    Args:
        folder: The folder of the run.
        step: The step at which training starts or resumes.
        references: Bits per byte to compare with, by name; they are merged with those of earlier starts.
    """
    environment = _read_environment(folder)
    start = {"step": step, **describe_environment(), "status": None, "end_time": None}
    _write_json(
        folder / ENVIRONMENT_FILE,
        {
            "starts": [*environment["starts"], start],
            "references": {**environment["references"], **references},
        },
    )


def record_end(folder: Path, *, status: str) -> None:
    """Record in `environment.json` how the last start ended."""
    environment = _read_environment(folder)
    if environment["starts"]:
        environment["starts"][-1] |= {"status": status, "end_time": _now()}
        _write_json(folder / ENVIRONMENT_FILE, environment)


def record_parameters(folder: Path, params: PyTree) -> None:
    """Write `parameters.json`."""
    _write_json(folder / PARAMETERS_FILE, describe_parameters(params))


def _describe_parameter(name: str, leaf: Any) -> dict[str, Any]:
    value = unboxed(leaf)
    sharding = getattr(value, "sharding", None)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else partition_names(leaf)
    spec += (None,) * (len(value.shape) - len(spec))
    return {
        "name": name,
        "shape": list(value.shape),
        "dtype": str(value.dtype),
        "spec": [list(axes) if isinstance(axes, tuple) else axes for axes in spec],
        "size": math.prod(value.shape),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _git(folder: Path | None, *arguments: str) -> str | None:
    command = ["git", *arguments]
    try:
        process = subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, errors="replace", timeout=GIT_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _read_environment(folder: Path) -> dict[str, Any]:
    """Return the content of `environment.json`; empty if the file is missing or damaged."""
    try:
        content = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
        return {"starts": list(map(dict, content["starts"])), "references": dict(content["references"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {"starts": [], "references": {}}


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, json.dumps(content, indent=1) + "\n")
