"""What a file of rows does when the disk or another program gets in the way."""

import csv
import errno
import io
from pathlib import Path

import pytest

from xlstm_jax.trainer.logger.tables import BLOCK_BYTES, CsvTable, JsonLines

KINDS = {"a.jsonl": JsonLines, "a.csv": CsvTable}


@pytest.fixture(params=KINDS.items(), ids=KINDS.keys())
def table(request, tmp_path):
    """A table of each kind with one row."""
    name, kind = request.param
    table = kind(tmp_path / name)
    table.append({"step": 1, "x": "old"})
    return table


class FullDisk(io.FileIO):
    """A file that takes the first bytes of a write only."""

    def write(self, data):
        super().write(data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")


class AlmostFullDisk(io.FileIO):
    """A file that takes the first bytes of a write and says so."""

    def write(self, data):
        return super().write(data[:3])


@pytest.mark.parametrize("disk", [FullDisk, AlmostFullDisk])
def test_a_row_that_does_not_fit_on_the_disk_leaves_the_file_as_it_was(table, monkeypatch, disk):
    before = table.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, mode, **_: disk(self, mode))
        with pytest.raises(OSError, match=r"No space|is the disk full"):
            table.append({"step": 2, "x": "lost"})
    assert table.path.read_bytes() == before
    table.append({"step": 3, "x": "new"})
    assert table.path.read_bytes().startswith(before)
    assert b"new" in table.path.read_bytes().splitlines()[-1]


@pytest.mark.parametrize("length", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_a_torn_line_of_any_length_is_dropped(tmp_path, length):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n' + "x" * length)
    JsonLines(path)
    assert path.read_text() == '{"step": 1}\n'


def test_lines_that_are_no_rows_do_not_keep_a_run_from_resuming(table):
    with table.path.open("ab") as file:
        file.write(b"garbage \xff\x00 {\n" + b"[" * 100_000 + b"\n")
    table.append({"step": 2, "x": "newer"})
    again = type(table)(table.path)
    assert again.has_after("step", 1)
    again.drop_after("step", 1)
    assert not again.has_after("step", 1)
    again.append({"step": 2, "x": "new", "y": 1.0})
    text = table.path.read_bytes().decode(errors="replace")
    assert "old" in text
    assert "newer" not in text
    assert "new" in text


def test_a_file_that_is_one_torn_line_starts_anew(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("step,lo")
    CsvTable(path).append({"step": 1})
    assert path.read_text() == "step\n1\n"


def test_rows_are_dropped_only_if_they_are_later(table):
    for step in [3, 2, 5]:
        table.append({"step": step})
    table.append({"x": "no step"})
    table.drop_after("step", 2)
    kept = table.path.read_text()
    assert [text in kept for text in ["old", "no step", "3", "5"]] == [True, True, False, False]
    table.append({"step": 4})
    assert "4" in table.path.read_text().splitlines()[-1]


def test_nothing_is_written_if_no_row_is_later(table):
    before = table.path.stat().st_ino
    table.drop_after("step", 1)
    table.drop_after("another", 0)
    assert table.path.stat().st_ino == before


def test_lines_of_others_are_left_alone(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('no json\n[1]\n{"step": "x"}\n{"step": 9}\n')
    JsonLines(path).drop_after("step", 1)
    assert path.read_text() == 'no json\n[1]\n{"step": "x"}\n'


def test_long_cells_are_read_back_and_the_limit_of_others_stays(tmp_path):
    limit = csv.field_size_limit()
    table = CsvTable(tmp_path / "a.csv")
    table.append({"step": 1, "x": list(range(limit))})
    table.append({"step": 2, "late": 1})
    table.drop_after("step", 1)
    assert CsvTable(table.path).columns == ["step", "x", "late"]
    assert table.path.read_text().count("\n") == 2
    assert csv.field_size_limit() == limit
