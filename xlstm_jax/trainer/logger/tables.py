"""Append-only tables in files that remain valid if the process is killed.

A row is one line, appended in a single write. A line that was cut short by a kill has no newline and is dropped when
the file is opened next. Every other change writes a new file and replaces the old one.
"""

import csv
import io
import json
import logging
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from xlstm_jax.trainer.logger.values import json_value
from xlstm_jax.utils.files import write_atomically

LOGGER = logging.getLogger(__name__)

BLOCK_BYTES = 2**16
LONGEST_CELL = 2**31 - 1


class JsonLines:
    """A file with one JSON object per row; non-finite numbers are `null`, arrays and tuples are lists.

    Args:
        path: The file, which need not be there yet.
    """

    def __init__(self, path: Path):
        self.path = path
        _drop_torn_line(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        _append(self.path, f"{_to_json(row)}\n")

    def has_after(self, key: str, step: int) -> bool:
        """Return whether there are rows whose number under `key` is larger than `step`."""
        return any(_is_later_line(line, key, step) for line in self._lines())

    def drop_after(self, key: str, step: int) -> None:
        """Remove the rows whose number under `key` is larger than `step`."""
        if self.has_after(key, step):
            write_atomically(self.path, (line for line in self._lines() if not _is_later_line(line, key, step)))

    def _lines(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from file


class CsvTable:
    """A CSV file whose header is extended when a row has a new column.

    Non-finite numbers are `nan`, `inf` and `-inf`. Single-line text is written unchanged, all other values as JSON.

    Args:
        path: The file, which need not be there yet.
    """

    def __init__(self, path: Path):
        self.path = path
        _drop_torn_line(path)
        self.columns = self._header()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row; missing columns are empty."""
        if not row.keys() <= set(self.columns):
            columns = list(dict.fromkeys([*self.columns, *row]))
            write_atomically(self.path, _to_csv(_widen(self._rows(), columns)))
            self.columns = columns
        (line,) = _to_csv([[_cell(row.get(column)) for column in self.columns]])
        _append(self.path, line.decode())

    def has_after(self, key: str, step: int) -> bool:
        """Return whether there are rows whose number in the column `key` is larger than `step`."""
        if key not in self.columns:
            return False
        position = self.columns.index(key)
        return any(_is_later_row(row, position, step) for row in self._rows())

    def drop_after(self, key: str, step: int) -> None:
        """Remove the rows whose number in the column `key` is larger than `step`."""
        if self.has_after(key, step):
            position = self.columns.index(key)
            rows = (row for row in self._rows() if not _is_later_row(row, position, step))
            write_atomically(self.path, _to_csv(rows))

    def _header(self) -> list[str]:
        with closing(self._rows()) as rows:
            return next(rows, [])

    def _rows(self) -> Generator[list[str], None, None]:
        if not self.path.exists():
            return
        limit = csv.field_size_limit(LONGEST_CELL)
        try:
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                yield from csv.reader(file)
        finally:
            csv.field_size_limit(limit)


def _append(path: Path, line: str) -> None:
    """Append a line in a single write; a partial line, as on a full disk, is removed."""
    data = line.encode()
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            written = file.write(data)
            if written != len(data):
                raise OSError(f"Only {written} of {len(data)} bytes fit into {path}: is the disk full?")
        except OSError:
            file.truncate(end)
            raise


def _drop_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_last_line(file, size)
        if end < size:
            file.truncate(end)
            LOGGER.warning("Dropped the last line of %s, whose writing was cut short: %d bytes.", path, size - end)


def _end_of_last_line(file: io.BufferedRandom, size: int) -> int:
    for start in range((size - 1) // BLOCK_BYTES * BLOCK_BYTES, -1, -BLOCK_BYTES):
        file.seek(start)
        newline = file.read(BLOCK_BYTES).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0


def _to_json(value: Any) -> str:
    return json.dumps(json_value(value, non_finite=lambda _: None), allow_nan=False)


def _is_later_line(line: bytes, key: str, step: int) -> bool:
    try:
        value = json.loads(line)[key]
    except (ValueError, KeyError, TypeError, RecursionError):  # Not one of our rows, so it is kept.
        return False
    return isinstance(value, int | float) and value > step


def _is_later_row(row: list[str], position: int, step: int) -> bool:
    try:
        return float(row[position]) > step
    except (ValueError, IndexError):  # The header, or not one of our rows.
        return False


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return str(value)
    is_line = isinstance(value, str) and value.isprintable()
    return value if is_line else _to_json(value)


def _widen(rows: Iterable[list[str]], columns: list[str]) -> Iterator[list[str]]:
    yield columns
    old = iter(rows)
    width = len(next(old, []))
    for row in old:
        yield row + [""] * (len(columns) - width)


def _to_csv(rows: Iterable[list[str]]) -> Iterator[bytes]:
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, lineterminator="\n")
    for row in rows:
        writer.writerow(row)
        yield buffer.getvalue().encode()
        buffer.seek(0)
        buffer.truncate()
