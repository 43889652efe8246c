"""Texts by number: they come back as they went in, in any process, and leave nothing behind."""

import errno
import gc
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xlstm_jax.dataset.sources.text_store import TextStore

pytestmark = pytest.mark.slow

TEXTS = ["first", "", "dritter: Bäume € 😀\r\n", "x" * 1000]
BUILD_AND_WAIT = """
import sys, time
from xlstm_jax.dataset.sources.text_store import TextStore
store = TextStore.build(["some text"], sys.argv[1])
print(store.path, flush=True)
{then}
"""


def start(folder, then):
    command = [sys.executable, "-c", BUILD_AND_WAIT.format(then=then), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip()
    return process


def end(process, signal_number=None):
    if signal_number is not None:
        process.send_signal(signal_number)
    process.communicate(timeout=30)


@given(texts=st.lists(st.text()), data=st.data())
def test_every_text_comes_back_by_its_number(texts, data):
    store = TextStore.build(iter(texts))
    assert len(store) == len(texts)
    assert store.num_bytes == sum(len(text.encode()) for text in texts)
    indices = data.draw(st.lists(st.integers(0, len(texts) - 1))) if texts else []
    assert store.read(indices) == [texts[index] for index in indices]


@pytest.mark.parametrize("index", [-1, 4])
def test_other_numbers_are_refused(index):
    with pytest.raises(IndexError, match=r"texts go from 0 to 3, not \[0, "):
        TextStore.build(TEXTS).read([0, index])


def test_the_digest_is_that_of_lengths_and_bytes():
    content = b"\x01\0\0\0\0\0\0\0a" + b"\x02\0\0\0\0\0\0\0" + "ä".encode()
    assert TextStore.build(["a", "ä"]).digest == hashlib.sha256(content).hexdigest()
    assert TextStore.build(["ab", "c"]).digest != TextStore.build(["a", "bc"]).digest


def test_a_copy_in_another_process_reads_the_same_file(tmp_path):
    store = TextStore.build(TEXTS, tmp_path)
    code = "import pickle, sys; print(ascii(pickle.load(sys.stdin.buffer).read([3, 2])))"
    payload = pickle.dumps(store)
    assert len(payload) < 500
    result = subprocess.run([sys.executable, "-c", code], input=payload, stdout=subprocess.PIPE, check=True)
    assert result.stdout.decode().strip() == ascii([TEXTS[3], TEXTS[2]])
    assert store.path.exists()


def test_a_copy_does_not_remove_the_file(tmp_path):
    store = TextStore.build(TEXTS, tmp_path)
    copy = pickle.loads(pickle.dumps(store))
    assert (copy.digest, copy.num_bytes, len(copy)) == (store.digest, store.num_bytes, len(store))
    del copy
    gc.collect()
    assert store.read([0]) == ["first"]
    assert store.path.exists()


def test_the_file_is_removed_with_the_store(tmp_path):
    store = TextStore.build(TEXTS, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_removed_if_building_fails(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        TextStore.build(["good", "\ud800"], tmp_path)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_there_are_no_locks_a_store_is_built_and_no_other_is_removed(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, "no locks")

    monkeypatch.setattr("fcntl.flock", flock)
    first, second = (TextStore.build(TEXTS, tmp_path) for _ in range(2))
    assert first.read([0]) == second.read([0]) == ["first"]
    assert set(tmp_path.iterdir()) == {first.path, second.path}


@pytest.mark.parametrize("name", ["fcntl.flock", "os.rename"])
def test_no_file_is_left_if_it_cannot_be_made(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(name, fail)
    with pytest.raises(OSError, match="broken"):
        TextStore.build(TEXTS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_removed_when_the_process_ends(tmp_path):
    end(start(tmp_path, then=""))
    assert list(tmp_path.iterdir()) == []


def test_the_file_stays_where_it_is_when_a_forked_copy_of_the_process_ends(tmp_path):
    then = "import os\nif not os.fork(): sys.exit()\nos.wait()\nprint('waited', flush=True)\ntime.sleep(600)"
    process = start(tmp_path, then)
    try:
        assert process.stdout.readline().strip() == "waited"
        assert len(list(tmp_path.iterdir())) == 1
    finally:
        end(process, signal.SIGKILL)


def test_the_file_of_a_killed_process_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(tmp_path):
    living, killed = (start(tmp_path, then="time.sleep(600)") for _ in range(2))
    try:
        end(killed, signal.SIGKILL)
        left = set(tmp_path.iterdir())
        assert len(left) == 2
        store = TextStore.build(["x"], tmp_path)
        now = set(tmp_path.iterdir())
        assert len(now) == 2
        assert len(now & left) == 1
        assert store.path in now
    finally:
        end(living, signal.SIGKILL)


def test_memory_does_not_grow_with_the_texts(tmp_path):
    tracemalloc.start()
    store = TextStore.build(("some words" * 1000 for _ in range(2000)), tmp_path)
    assert store.read([1999]) == ["some words" * 1000]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000 < store.num_bytes


def test_the_folder_for_temporary_files_is_used_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert os.path.dirname(TextStore.build(TEXTS).path) == str(tmp_path)
