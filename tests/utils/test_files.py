"""Files are replaced as a whole."""

import os

import pytest

from xlstm_jax.utils.files import write_atomically


@pytest.mark.parametrize("content", ["größer\n", ["größ".encode(), b"er\n"]], ids=["text", "chunks"])
def test_text_and_chunks_are_written_as_they_are(tmp_path, content):
    write_atomically(tmp_path / "new" / "file.txt", content)
    assert (tmp_path / "new" / "file.txt").read_bytes() == "größer\n".encode()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.txt"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    def chunks():
        yield b"half"
        raise OSError("the disk is full")

    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="full"):
        write_atomically(path, chunks())
    assert path.read_text() == "old"


def test_a_crash_while_a_file_is_replaced_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, [b"old"])
    monkeypatch.setattr(os, "fsync", lambda _: pytest.fail("crash"))
    with pytest.raises(pytest.fail.Exception):
        write_atomically(path, [b"new"])
    assert path.read_bytes() == b"old"
