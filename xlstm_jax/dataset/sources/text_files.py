"""Plain text, JSON lines and Parquet files as a source: one document at a time, always in the same order."""

import contextlib
import glob
import hashlib
import importlib
import io
import itertools
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import TextFilesDataConfig
from xlstm_jax.dataset.sources.bad_data import BadDataPolicy, BadDocument, OnBadData, check_text, not_utf8
from xlstm_jax.dataset.sources.source import BEGINNING, PathOptions, Position
from xlstm_jax.dataset.sources.text_store import TextStore

LOGGER = logging.getLogger(__name__)


_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma", ".zst": "pyarrow"}
"""The module that reads each compression, by suffix; imported when needed, as some builds of Python lack one."""
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET_ROWS = 256
"""The number of rows read at a time."""
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
"""The number of parts of a file that its description hashes."""
_SHORTEST_DOCUMENT = 4
"""The largest number of bytes of a UTF-8 character: no piece of a document is shorter."""


class TextFiles:
    """The documents of files. Files are listed when it is created, and read lazily.

    A plain text file is one document, or several if it is long. Each line of JSON lines (`.jsonl`, `.ndjson`, `.json`),
    an object, is a document, and so is each row of a Parquet file. All but Parquet files may be compressed (`.gz`,
    `.bz2`, `.xz`, `.zst`).

    Args:
        path: A file, a folder (all files in it and its subfolders that are not hidden), or a pattern such as
            `data/*.txt`; or several of these.
        column: The field of an object, or the column of a table, that holds the text.
        on_bad_data: Whether an unusable document is an error, or is skipped and counted in `skipped`.
        max_document_bytes: Longer plain text is cut at line ends, or between characters if a line is longer; the
            documents together are the text. `None` for no cuts.

    Raises:
        ValueError: There is no file, or a path is neither a file nor a folder.
    """

    def __init__(
        self,
        path: str | os.PathLike | Sequence[str | os.PathLike],
        column: str = "text",
        on_bad_data: OnBadData = "error",
        max_document_bytes: int | None = 65536,
    ):
        if max_document_bytes is not None and max_document_bytes < _SHORTEST_DOCUMENT:
            raise ConfigError(f"max_document_bytes is {max_document_bytes}, but must be at least {_SHORTEST_DOCUMENT}.")
        paths = [path] if isinstance(path, str | os.PathLike) else path
        self._paths = [os.fspath(part) for part in paths]
        self.files = tuple(dict.fromkeys(file for part in self._paths for file in _find_files(part)))
        self._sizes = [file.stat().st_size if file.exists() else 0 for file in self.files]
        self._column = column
        self._max_document_bytes = max_document_bytes
        self._policy = BadDataPolicy(on_bad_data)
        self._bytes_of_read_files = 0
        self._open_file: io.BufferedIOBase | None = None

    @property
    def skipped(self) -> Counter[str]:
        """The number of skipped documents, by reason."""
        return self._policy.skipped

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(self._sizes)

    @property
    def num_bytes_read(self) -> int:
        """The number of bytes read up to the end of the last document."""
        return self._bytes_of_read_files + (self._open_file.tell() if self._open_file else 0)

    @property
    def locations(self) -> list[Path]:
        """The given files and folders, and all files found there."""
        return [*(Path(match) for path in self._paths for match in _find_matches(path)), *self.files]

    def __iter__(self) -> Iterator[str]:
        self.skipped.clear()
        for _, text in self.documents():
            yield text
        if self.skipped:
            reasons = ", ".join(f"{count} × {reason}" for reason, count in self.skipped.most_common())
            LOGGER.warning("Skipped documents of %s: %s.", ", ".join(self._paths), reasons)

    def numbered(self) -> TextStore:
        """Return the texts by number, in a temporary file."""
        return TextStore.build(self)

    def documents(self, start: Position = BEGINNING) -> Iterator[tuple[Position, str]]:
        """Yield documents with their positions, from a position on."""
        first_file, first_document = start
        self._bytes_of_read_files = sum(self._sizes[:first_file])
        for index in range(first_file, len(self.files)):
            good = enumerate(self._good_documents(self.files[index]))
            for number, text in itertools.islice(good, first_document if index == first_file else 0, None):
                yield (index, number), text
            self._bytes_of_read_files += self._sizes[index]

    def sample(self, num_bytes: int) -> Iterator[str]:
        """Yield documents from the start of each file, in proportion to its size, of about `num_bytes` in total."""
        taken = 0
        for index, end in enumerate(itertools.accumulate(self._sizes)):
            wanted = num_bytes * end / max(self.num_bytes, 1)
            if taken < wanted:
                for text in self._good_documents(self.files[index]):
                    yield text
                    taken += len(text.encode())
                    if taken >= wanted:
                        break

    def describe(self) -> dict[str, Any]:
        """Return, for JSON, what determines the documents: names, sizes and samples of the files."""
        sha256 = hashlib.sha256()
        for file, size in zip(self.files, self._sizes, strict=True):
            sha256.update(f"{file.name}\0{size}\0".encode(errors="surrogateescape"))
            with contextlib.suppress(OSError):  # An unreadable file is reported as a bad document.
                for content in _read_samples(file, size):
                    sha256.update(content)
        return {
            "paths": self._paths,
            "num_files": len(self.files),
            "num_bytes": self.num_bytes,
            "sha256_of_names_sizes_and_samples": sha256.hexdigest(),
            "column": self._column,
            "max_document_bytes": self._max_document_bytes,
        }

    def _good_documents(self, file: Path) -> Iterator[str]:
        for document in self._all_documents(file):
            if isinstance(document, str):
                yield document
            else:
                self._policy.handle(document, file)

    def _all_documents(self, file: Path) -> Iterator[str | BadDocument]:
        count = 0
        try:
            for count, document in enumerate(self._read(file), 1):  # noqa: B007
                yield document
        except OSError as error:
            yield BadDocument("damaged file", f"it cannot be read to its end ({error})", f"after document {count}")
        else:
            if not count:
                yield BadDocument("empty file", "there is nothing in it")

    def _read(self, file: Path) -> Iterator[str | BadDocument]:
        compression = file.suffix if file.suffix in _COMPRESSIONS else ""
        name = file.name.removesuffix(compression)
        if name.endswith(".parquet"):
            yield from _read_parquet(file, self._column)
            return
        with self._open(file, compression) as stream:
            if name.endswith(_JSON_LINES):
                yield from _read_json_lines(stream, self._column)
            else:
                yield from _read_plain_text(stream, self._max_document_bytes)

    @contextlib.contextmanager
    def _open(self, file: Path, compression: str) -> Iterator[io.BufferedIOBase]:
        with open(file, "rb") as self._open_file:
            try:
                with _decompressed(self._open_file, compression) as stream:
                    yield stream
            finally:
                self._open_file = None


def open_config(config: TextFilesDataConfig) -> TextFiles:
    """Open the files of a data set."""
    return TextFiles(
        str(config.data_path),
        column=config.data_column,
        on_bad_data=config.on_bad_data,
        max_document_bytes=config.max_document_bytes,
    )


def open_paths(paths: Sequence[str], options: PathOptions) -> TextFiles:
    """Open files, folders and patterns."""
    return TextFiles(paths, options.column, options.on_bad_data, options.max_document_bytes)


def _read_samples(file: Path, size: int) -> Iterator[bytes]:
    """Yield all of a small file; of a large one, its beginning, its end and parts between."""
    last = max(size - _SAMPLE_BYTES, 0)
    step = max(-(-last // (_NUM_SAMPLES - 1)), _SAMPLE_BYTES)
    with open(file, "rb") as stream:
        for start in (*range(0, last, step), last):
            stream.seek(start)
            yield stream.read(_SAMPLE_BYTES)


def _find_matches(path: str) -> list[str]:
    path = os.path.expanduser(path)
    return [path] if os.path.exists(path) else glob.glob(path, recursive=True)


def _find_files(path: str) -> list[Path]:
    matches = _find_matches(path)
    if not matches:
        raise ValueError(f"There is no file, and no folder, at {path}.")
    if len(matches) == 1 and _is_special(Path(matches[0])):
        raise ValueError(f"{path} is neither a file nor a folder: write its output to a file.")
    files = sorted({file for match in matches for file in _files_at(Path(match))})
    if not files:
        raise ValueError(f"There are no files below {path}, or all are hidden.")
    return files


def _files_at(path: Path, links: frozenset[Path] = frozenset()) -> Iterator[Path]:
    if not path.is_dir():
        if not _is_special(path):
            yield path
    elif path.resolve() not in links:  # A link may lead back to a folder above it.
        for part in path.iterdir():
            if not part.name.startswith("."):
                yield from _files_at(part, links | {path.resolve()})


def _is_special(path: Path) -> bool:
    """Return whether reading a path could block forever, as for a pipe; a dangling link is only bad data."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def _decompressed(file: io.BufferedIOBase, compression: str) -> Iterator[io.BufferedIOBase]:
    if not compression:
        yield file
        return
    if compression == ".zst":
        with _import_pyarrow(".zst").input_stream(file, compression="zstd") as stream:
            yield io.BufferedReader(stream)
        return
    module = importlib.import_module(_COMPRESSIONS[compression])
    try:
        with module.open(file) as stream:
            yield stream
    except (EOFError, zlib.error, getattr(module, "LZMAError", EOFError)) as error:
        raise OSError(str(error)) from error


def _read_plain_text(stream: io.BufferedIOBase, max_bytes: int | None) -> Iterator[str | BadDocument]:
    num_lines = 0
    for content in [stream.read()] if max_bytes is None else cut_at_lines(stream, max_bytes):
        if content:
            yield _decode(content, first_line=num_lines + 1)
            num_lines += content.count(b"\n")


def cut_at_lines(stream: io.BufferedIOBase, max_bytes: int) -> Iterator[bytes]:
    """Yield text in pieces that end at line ends, or between characters if a line is longer than a piece."""
    content = stream.read(max_bytes + 1)
    while len(content) > max_bytes:
        end = content.rfind(b"\n", 0, max_bytes) + 1 or _last_character_border(content, max_bytes)
        yield content[:end]
        content = content[end:] + stream.read(max_bytes + 1 - (len(content) - end))
    yield content


def _last_character_border(content: bytes, end: int) -> int:
    """Return the last index up to `end` that does not cut a UTF-8 character."""
    borders = range(end, end - _SHORTEST_DOCUMENT, -1)
    return next((border for border in borders if content[border] & 0xC0 != 0x80), end)


def _decode(content: bytes, first_line: int) -> str | BadDocument:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        return not_utf8(error)._replace(place=f"line {line}")


def _read_json_lines(stream: io.BufferedIOBase, column: str) -> Iterator[str | BadDocument]:
    for number, content in enumerate(stream, 1):
        line = _decode(content.removeprefix(b"\xef\xbb\xbf") if number == 1 else content, first_line=number)
        if isinstance(line, BadDocument):
            yield line
        elif line.strip():
            document = _parse_json(line, column)
            yield document if isinstance(document, str) else document._replace(place=f"line {number}")


def _parse_json(line: str, column: str) -> str | BadDocument:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        cause = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
        return BadDocument("no JSON", f"this is no JSON ({cause}), but each line must be an object")
    if not isinstance(fields, dict):
        return BadDocument("no JSON object", f"this is a {type(fields).__name__}, but each line must be an object")
    if column not in fields:
        return BadDocument("missing field", f"there is no field {column!r} among {list(fields)}")
    return check_text(fields[column])


def _read_parquet(file: Path, column: str) -> Iterator[str | BadDocument]:
    pyarrow = _import_pyarrow("Parquet")
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file, memory_map=True) as table:
            names = table.schema_arrow.names
            if column not in names:
                yield BadDocument("missing field", f"there is no column {column!r} among {names}")
                return
            batches = table.iter_batches(_PARQUET_ROWS, columns=[column], use_threads=False)
            rows = (value for batch in batches for value in batch.column(0))
            for number, value in enumerate(rows, 1):
                document = _parse_value(value)
                yield document if isinstance(document, str) else document._replace(place=f"row {number}")
    except pyarrow.ArrowInvalid as error:
        raise OSError(str(error)) from error


def _parse_value(value: Any) -> str | BadDocument:
    try:
        return check_text(value.as_py())
    except UnicodeDecodeError as error:
        return not_utf8(error)


def _import_pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f'{what} files are read with pyarrow: pip install "xlstm_jax[hf]".') from error
    return pyarrow
