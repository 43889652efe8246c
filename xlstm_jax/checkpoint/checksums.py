"""Checksums: the size and the digest of every file of a checkpoint.

`checksums.json` lists the files of each item (`params`, `metadata`, ...) with their sizes and SHA-256 digests. It is
written before Orbax commits a checkpoint, so every committed checkpoint has it. It contains its own digest as well, so
a flipped, missing or additional byte is detected in any file.

A document that is replaced later, such as `metrics`, has two valid versions while both files are being written, so the
checkpoint stays valid whenever the process is killed.
"""

import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping

from etils import epath

from xlstm_jax.checkpoint.files import write_atomically

CHECKSUMS_FILE = "checksums.json"
ROOT = "."
"""The item name of the files that Orbax writes directly into the folder of the checkpoint."""
ABSENT = "absent"
"""As a valid version of a file: the file may be missing."""
IGNORED_FILES = (CHECKSUMS_FILE, "*.tmp", ".nfs*", ".DS_Store")
"""Files that may exist or not: leftovers of unfinished writes, network file systems and file managers."""
_CHUNK_BYTES = 16 * 2**20

Versions = list[str]
"""The valid versions of a file, as `<size>:<digest>`."""


class CorruptCheckpointError(ValueError):
    """A checkpoint differs from what was written, or parts of it are missing."""


@dataclasses.dataclass(frozen=True)
class Checksums:
    """The valid versions of every file of a checkpoint, by item and path within the item."""

    items: Mapping[str, Mapping[str, Versions]]

    @classmethod
    def compute(cls, checkpoint: epath.Path) -> "Checksums":
        """Compute the checksums of all files of a newly written checkpoint."""
        folders = [path for path in checkpoint.iterdir() if path.is_dir()]
        files = [(folder.name, name) for folder in folders for name in _files(folder)]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            versions = threads.map(lambda file: _version(checkpoint / file[0] / file[1]), files)
            items: dict[str, dict[str, Versions]] = {folder.name: {} for folder in folders}
            for (item, name), version in zip(files, versions, strict=True):
                items[item][name] = [version]
        return cls(items)

    @classmethod
    def read(cls, checkpoint: epath.Path) -> "Checksums | None":
        """Read the checksums of a checkpoint; `None` if it has none.

        Raises:
            CorruptCheckpointError: If the file with the checksums is itself corrupt.
        """
        file = checkpoint / CHECKSUMS_FILE
        if not file.exists():
            return None
        content = file.read_bytes()
        try:
            checksums = cls(json.loads(content)["items"])
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(f"{CHECKSUMS_FILE} is damaged") from error
        if checksums._render().encode() != content:
            raise CorruptCheckpointError(f"{CHECKSUMS_FILE} is damaged")
        return checksums

    def write(self, checkpoint: epath.Path) -> None:
        """Write the checksums to the folder of a checkpoint."""
        write_atomically(checkpoint / CHECKSUMS_FILE, self._render())

    def with_versions(self, item: str, name: str, versions: Versions) -> "Checksums":
        """Set the valid versions of one file."""
        return Checksums({**self.items, item: {**self.items.get(item, {}), name: versions}})

    def check(self, item: str, name: str, content: bytes | None) -> None:
        """Raise an error if the content of a file is not a valid version; `None` stands for a missing file."""
        if problem := _compare(f"{item}/{name}", _describe(content), self.items.get(item, {}).get(name, [ABSENT])):
            raise CorruptCheckpointError(problem)

    def problem(self, checkpoint: epath.Path, items: Collection[str] | None = None) -> str | None:
        """Read the files of items and describe the first problem; `None` if all files are valid.

        Args:
            checkpoint: The folder of the checkpoint.
            items: The names of the items; all by default. Items that were not saved are ignored.
        """
        checked = [item for item in self.items if items is None or item in items]
        files = [(item, name) for item in checked for name in self.items[item]]
        with concurrent.futures.ThreadPoolExecutor() as threads:
            found = threads.map(
                lambda file: _file_problem(checkpoint, *file, versions=self.items[file[0]][file[1]]), files
            )
            problem = next((problem for problem in found if problem is not None), None)
        return problem or next((f"{name} was added" for name in self._unlisted(checkpoint, checked, items)), None)

    def _unlisted(self, checkpoint: epath.Path, checked: list[str], items: Collection[str] | None) -> Iterator[str]:
        if items is None:
            yield from (path.name for path in checkpoint.iterdir() if path.is_dir() and path.name not in self.items)
        for item in checked:
            if item == ROOT:
                yield from (name for name in _root_files(checkpoint) if name not in self.items[item])
            elif (checkpoint / item).exists():
                yield from (f"{item}/{name}" for name in _files(checkpoint / item) if name not in self.items[item])

    def _render(self) -> str:
        digest = hashlib.sha256(json.dumps(self.items, sort_keys=True).encode()).hexdigest()
        return json.dumps({"algorithm": "sha256", "digest": digest, "items": self.items}, sort_keys=True, indent=1)


def seal(checkpoint: epath.Path) -> None:
    """Store the checksums of a checkpoint once its items are written."""
    Checksums.compute(checkpoint).write(checkpoint)


def seal_root(checkpoint: epath.Path) -> None:
    """Add the checksums of the files directly in the folder of the checkpoint, which Orbax writes when it commits."""
    checksums = Checksums.read(checkpoint)
    if checksums is None:
        raise RuntimeError(f"{checkpoint} was committed without {CHECKSUMS_FILE}.")
    for name in _root_files(checkpoint):
        checksums = checksums.with_versions(ROOT, name, [_version(checkpoint / name)])
    checksums.write(checkpoint)


def replace_file(checkpoint: epath.Path, item: str, name: str, text: str) -> None:
    """Write or replace a small file of a checkpoint, together with its checksum.

    If the process is killed at any time, either the old or the new file exists and is valid.
    """
    checksums, file = Checksums.read(checkpoint), checkpoint / item / name
    if checksums is None:
        write_atomically(file, text)
        return
    before = checksums.items.get(item, {}).get(name, [ABSENT])
    after = _describe(text.encode())
    checksums.with_versions(item, name, [*before, after]).write(checkpoint)
    write_atomically(file, text)
    checksums.with_versions(item, name, [after]).write(checkpoint)


def _files(folder: epath.Path, prefix: str = "") -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to it."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif _is_listed(path.name):
            yield prefix + path.name


def _root_files(checkpoint: epath.Path) -> list[str]:
    """Return the names of the files directly in the folder of the checkpoint."""
    return [path.name for path in checkpoint.iterdir() if not path.is_dir() and _is_listed(path.name)]


def _is_listed(name: str) -> bool:
    return not any(fnmatch.fnmatch(name, pattern) for pattern in IGNORED_FILES)


def _file_problem(checkpoint: epath.Path, item: str, name: str, *, versions: Versions) -> str | None:
    shown = name if item == ROOT else f"{item}/{name}"
    try:
        return _compare(shown, _version(checkpoint / shown), versions)
    except OSError as error:
        return f"{shown} cannot be read ({error})"


def _compare(name: str, version: str, versions: Versions) -> str | None:
    """Describe how a file differs from its valid versions; `None` if it is one of them."""
    if version in versions:
        return None
    if version == ABSENT:
        return f"{name} is missing"
    sizes = [known.partition(":")[0] for known in versions if known != ABSENT]
    size = version.partition(":")[0]
    if not sizes:
        return f"{name} was added"
    if size not in sizes:
        return f"{name} has {size} bytes instead of {sizes[-1]}"
    return f"{name} does not have the bytes that were written"


def _version(file: epath.Path) -> str:
    """Return the version of a file, reading it in chunks."""
    digest, size = hashlib.sha256(), 0
    try:
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    return f"{size}:{digest.hexdigest()}"


def _describe(content: bytes | None) -> str:
    """Return the version of a file with the given content; `None` stands for a missing file."""
    return ABSENT if content is None else f"{len(content)}:{hashlib.sha256(content).hexdigest()}"
