"""Workers answer in order, and neither outlive their parent nor take it with them."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dataset.corpora import do_task
from processes import is_running, wait_until

from xlstm_jax.dataset.background.workers import WorkerPool


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(do_task, 2) as pool:
        yield pool


def test_results_come_in_the_order_of_the_tasks_from_all_workers(pool):
    tasks, ids = zip(*pool.map(range(11)), strict=True)
    assert tasks == tuple(range(11))
    assert len(set(ids)) == 2
    assert os.getpid() not in ids


def test_without_workers_a_thread_of_this_process_does_the_same():
    with WorkerPool(do_task, 0) as pool:
        assert list(pool.map(range(5))) == [(index, os.getpid()) for index in range(5)]


def test_results_can_be_asked_for_in_any_order(pool):
    answers = [pool.submit(index) for index in range(6)]
    assert [answer.result()[0] for answer in reversed(answers)] == [5, 4, 3, 2, 1, 0]


def test_an_iterator_that_is_left_early_spoils_nothing(pool):
    assert next(pool.map(range(100)))[0] == 0
    assert [task for task, _ in pool.map("abc")] == ["a", "b", "c"]


def test_what_a_task_raises_is_raised_here_and_the_worker_goes_on(pool):
    with pytest.raises(KeyError, match="no such thing") as caught:
        list(pool.map(["fail"]))
    assert "do_task" in caught.value.__notes__[0]
    assert [task for task, _ in pool.map("ab")] == ["a", "b"]


def test_a_function_of_a_script_reaches_the_workers(pool):
    with WorkerPool(lambda task: task + 1, 1) as own:
        assert list(own.map([1, 2])) == [2, 3]


def test_a_worker_that_is_killed_is_an_error_and_not_a_hang():
    with WorkerPool(do_task, 1) as pool, pytest.raises(RuntimeError, match="ended with code -9"):
        list(pool.map(["die", 1, 2]))


def test_closing_does_not_wait_for_a_task():
    pool = WorkerPool(do_task, 1)
    pool.submit("sleep")
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 10


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    script = """
import pathlib, sys
from dataset.corpora import do_task
from processes import is_running, wait_until
from xlstm_jax.dataset.background.workers import WorkerPool
pool = WorkerPool(do_task, 2)
for name in sys.argv[1:]:
    pool.submit(pathlib.Path(name))
sys.stdin.read()
"""
    files = [tmp_path / "first", tmp_path / "second"]
    path = os.pathsep.join(str(folder) for folder in Path(__file__).parents[2:4])
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, files)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
    )
    with parent:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        workers = [int(file.read_text()) for file in files]
        assert all(map(is_running, workers))
        parent.kill()
    wait_until(lambda: not any(map(is_running, workers)))


def test_workers_of_a_pool_that_nobody_has_any_more_end():
    pool = WorkerPool(do_task, 1)
    ((_, worker),) = pool.map([0])
    del pool
    gc.collect()
    wait_until(lambda: not is_running(worker))
