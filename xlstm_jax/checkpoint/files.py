"""Files and folders, local or on remote storage, such that no half of one looks like a whole."""

import os
import re
import shutil
from pathlib import Path

from etils import epath

from xlstm_jax.utils import files

FOLDER = "checkpoints"
COMMIT_FILE = "commit_success.txt"
"""Without this file, Orbax takes a checkpoint on remote storage for half written."""
TEMPORARY_INFIX = ".orbax-checkpoint-tmp"
"""In the name of a local folder that Orbax is writing; on remote storage it writes into the final one."""
DELETED_PREFIX = "deleted-"
"""Orbax does not list folders of such names, and does not clean them up either, which it does beside other work."""
CORRUPT_PREFIX = "corrupt-"
"""Corrupt checkpoints are renamed, so that they are neither listed nor deleted."""


def absolute(folder: str | os.PathLike) -> epath.Path:
    """Return the absolute path of a folder that Orbax can write to."""
    text = os.fspath(folder)
    if text.startswith("gs://"):
        return epath.Path(text)
    if re.match(r"\w{2,}:/", text):
        raise ValueError(
            f"Checkpoints cannot be kept in {text}, only in local folders and on Google Cloud Storage. Mount other "
            "storage as a folder; give gs://bucket/folder as a string, as pathlib takes a slash away."
        )
    return epath.Path(os.path.abspath(os.path.expanduser(text)))


def checkpoint_folder(run: str | os.PathLike) -> epath.Path:
    """Return the folder of the checkpoints of a run, from the folder of the run or from itself."""
    path = absolute(run)
    return path if path.name == FOLDER else path / FOLDER


def is_remote(path: epath.Path) -> bool:
    """Tell whether a path is not one of this machine's file system."""
    return "://" in os.fspath(path)


def free_bytes(folder: epath.Path) -> int | None:
    """Return how much room a folder has, or the nearest one around it that is there; `None` for a remote one."""
    if is_remote(folder):
        return None
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return shutil.disk_usage(there).free


def write_atomically(file: epath.Path, text: str) -> None:
    """Write a small file: readers see the old one, or none, until the new one is whole."""
    if is_remote(file):  # An object there is whole or absent.
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    else:
        files.write_atomically(Path(file), text)


def delete_checkpoint(path: epath.Path) -> None:
    """Delete the folder of a checkpoint; from the first moment on, Orbax no longer takes it for a whole one."""
    if is_remote(path):
        (path / COMMIT_FILE).unlink(missing_ok=True)
        path.rmtree()
    else:
        path.rename(path.with_name(DELETED_PREFIX + path.name)).rmtree()


def quarantine(path: epath.Path) -> epath.Path:
    """Rename a corrupt checkpoint, and return its new path."""
    names = [f"{CORRUPT_PREFIX}{path.name}", *(f"{CORRUPT_PREFIX}{path.name}.{number}" for number in range(1, 1000))]
    free = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    return path.rename(free)


def quarantined(folder: epath.Path) -> list[epath.Path]:
    """Return the corrupt checkpoints of a folder that were renamed."""
    return sorted(folder.glob(f"{CORRUPT_PREFIX}*")) if folder.exists() else []


def clean_up(folder: epath.Path) -> None:
    """Delete what a process that was killed was writing or deleting."""
    for pattern in (f"{DELETED_PREFIX}*", f"*{TEMPORARY_INFIX}*"):
        for path in folder.glob(pattern):
            path.rmtree()
