"""Files and folders, local or on remote storage, such that no half of one looks like a whole."""

import os
import re

from etils import epath

FOLDER = "checkpoints"
COMMIT_FILE = "commit_success.txt"
"""Without this file, Orbax takes a checkpoint on remote storage for half written."""
DELETED_PREFIX = "deleted-"
"""Orbax does not list folders of such names, and does not clean them up either, which it does beside other work."""


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


def write_atomically(file: epath.Path, text: str) -> None:
    """Write a small file: readers see the old one, or none, until the new one is whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if is_remote(file):  # An object there is whole or absent.
        file.write_text(text)
        return
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_text(text)
    temporary.replace(file)


def delete_checkpoint(path: epath.Path) -> None:
    """Delete the folder of a checkpoint; from the first moment on, Orbax no longer takes it for a whole one."""
    if is_remote(path):
        (path / COMMIT_FILE).unlink(missing_ok=True)
        path.rmtree()
    else:
        path.rename(path.with_name(DELETED_PREFIX + path.name)).rmtree()


def clean_up(folder: epath.Path) -> None:
    """Finish what a process that was killed had begun to delete."""
    for path in folder.glob(f"{DELETED_PREFIX}*"):
        path.rmtree()
