"""Files and folders of checkpoints, local or on remote storage; unfinished ones are never taken for complete."""

import os
import re
import shutil
from pathlib import Path

from etils import epath

from xlstm_jax.utils import files

FOLDER = "checkpoints"
COMMIT_FILE = "commit_success.txt"
"""Without this file, Orbax treats a checkpoint on remote storage as incomplete."""
TEMPORARY_INFIX = ".orbax-checkpoint-tmp"
"""Part of the name of a local folder while Orbax writes it; on remote storage Orbax writes to the final folder."""
DELETED_PREFIX = "deleted-"
"""Prefix of folders that are being deleted. Orbax neither lists them nor cleans them up in the background."""
CORRUPT_PREFIX = "corrupt-"
"""Prefix of renamed corrupt checkpoints, which are neither listed nor deleted."""


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
    """Return the folder of the checkpoints of a run, given the folder of the run or that folder itself."""
    path = absolute(run)
    return path if path.name == FOLDER else path / FOLDER


def is_remote(path: epath.Path) -> bool:
    """Return whether a path is on remote storage rather than in a mounted file system."""
    return "://" in os.fspath(path)


def free_bytes(folder: epath.Path) -> int | None:
    """Return the free disk space of a folder, or of its nearest existing parent; `None` for a remote folder."""
    if is_remote(folder):
        return None
    there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return shutil.disk_usage(there).free


def write_atomically(file: epath.Path, text: str) -> None:
    """Write a small file atomically: readers see the old file, or none, until the new one is complete."""
    if is_remote(file):  # A remote object is either complete or absent.
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    else:
        files.write_atomically(Path(file), text)


def delete_checkpoint(path: epath.Path) -> None:
    """Delete the folder of a checkpoint so that Orbax never treats a partly deleted one as complete."""
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
    """Return the renamed corrupt checkpoints of a folder."""
    return sorted(folder.glob(f"{CORRUPT_PREFIX}*")) if folder.exists() else []


def clean_up(folder: epath.Path) -> None:
    """Delete the leftovers of writes and deletions that were cut short by a kill."""
    for pattern in (f"{DELETED_PREFIX}*", f"*{TEMPORARY_INFIX}*"):
        for path in folder.glob(pattern):
            path.rmtree()
