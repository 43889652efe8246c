"""Check that a folder can hold runs: it is writable, has free space and renames atomically; measure its speed."""

import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from xlstm_jax.cli.checks.section import FAILED, PASSED, WARNING, Section, first_line

LITTLE_SPACE = 10 * 2**30
FILE_BYTES = 64 * 2**20
IN_MEMORY = re.compile(r"tmpfs|ramfs|devtmpfs")
ON_A_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|gpfs|beegfs|ceph|afs|9p|virtiofs|glusterfs|wekafs|pvfs2|orangefs|panfs|fuse\.(?!ecryptfs).*"
)


def check_disk(title: str, folders: list[Path], *, with_speed: bool) -> Section:
    """Check each folder; `with_speed` also writes, reads and removes a file of 64 MiB."""
    section = Section(title, ("folder", "check", "result"))
    for folder in folders:
        _check_folder(section, folder, with_speed)
    return section


def _check_folder(section: Section, folder: Path, with_speed: bool) -> None:
    name = str(folder.resolve())
    try:
        # The checked folder may be on another file system than the default folder for temporary files.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".xlstm-jax-doctor-") as inner:
            section.add(name, "writable", PASSED)
            section.add(name, "free space", _free_space(folder))
            section.add(name, "file system", file_system(folder))
            for check, function in (("atomic rename", _rename), ("64 MiB", _speed)):
                if with_speed or function is not _speed:
                    section.add(name, check, f"{PASSED} {function(Path(inner))}".rstrip())
    except OSError as error:
        section.add(name, "all of it", f"{FAILED} {first_line(error)}")
        section.problems.append(f"{name}: {first_line(error)}")


def _free_space(folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    return f"{WARNING if free < LITTLE_SPACE else PASSED} {free / 2**30:.1f} GiB"


def file_system(folder: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Describe the type of file system that a folder is on."""
    if not mounts.exists():
        return "unknown"
    lines = (line.split() for line in mounts.read_text().splitlines())
    # A later mount hides an earlier one on the same folder; `max` returns the first of equals, so reverse the order.
    points = [(Path(_unescape(fields[1])), fields[2]) for fields in lines][::-1]
    above = [(len(point.parts), kind) for point, kind in points if folder.resolve().is_relative_to(point)]
    kind = max(above, key=lambda pair: pair[0], default=(0, "unknown"))[1]
    if IN_MEMORY.fullmatch(kind):
        return f"{kind}: in memory, lost when the machine stops"
    return f"{kind}: on a network" if ON_A_NETWORK.fullmatch(kind) else kind


def _unescape(point: str) -> str:
    """Decode the octal escapes of /proc/mounts, which stand for spaces and the like."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)


def _rename(inner: Path) -> str:
    """Rename a file over another one and a folder to a new name, as saving a checkpoint does."""
    old, new = inner / "old", inner / "new"
    old.write_text("old")
    new.write_text("new")
    new.replace(old)
    (inner / "half").mkdir()
    (inner / "half" / "file").write_text("whole")
    (inner / "half").rename(inner / "whole")
    if old.read_text() != "new" or new.exists() or (inner / "whole" / "file").read_text() != "whole":
        raise OSError("a renamed file or folder is not what it was")
    return ""


def _speed(inner: Path) -> str:
    """Measure writing, flushing and reading a file, bypassing the page cache where the system can drop it."""
    content, file = os.urandom(2**20), inner / "speed"
    start = time.perf_counter()
    with file.open("wb") as stream:
        for _ in range(FILE_BYTES // len(content)):
            stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
        written = time.perf_counter()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        is_same = all(part == content for part in iter(lambda: stream.read(len(content)), b""))
    end = time.perf_counter()
    if not is_same or file.stat().st_size != FILE_BYTES:
        raise OSError("what was read is not what was written")
    return f"written and flushed at {_rate(written - start)}, read at {_rate(end - begin)}"


def _rate(seconds: float) -> str:
    return f"{FILE_BYTES / max(seconds, 1e-9) / 2**20:.0f} MiB/s"
