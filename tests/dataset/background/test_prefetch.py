"""A thread is ahead of those who ask, by as much as it may."""

import itertools
import threading
import time

import pytest

from xlstm_jax.dataset.background.prefetch import Prefetcher


def test_results_come_in_order_and_the_thread_is_no_further_ahead_than_it_may_be():
    made = []
    numbers = itertools.count()

    def produce():
        made.append(next(numbers))
        return made[-1]

    prefetcher = Prefetcher(produce, depth=2)
    assert [prefetcher.next() for _ in range(3)] == [0, 1, 2]
    deadline = time.monotonic() + 10
    while len(made) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    prefetcher.stop()
    assert len(made) == 3 + 2 + 1  # Two wait, and one is in the hands of the thread.


def test_what_the_function_raises_is_raised_in_its_turn_and_the_next_call_begins_anew():
    outcomes = iter([1, ValueError("broken"), 2])

    def produce():
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    prefetcher = Prefetcher(produce, depth=4)
    assert prefetcher.next() == 1
    with pytest.raises(ValueError, match="broken"):
        prefetcher.next()
    assert not prefetcher.is_running
    assert prefetcher.next() == 2
    prefetcher.stop()


def test_a_stopped_prefetcher_leaves_no_thread():
    before = threading.active_count()
    prefetcher = Prefetcher(lambda: 0, depth=1)
    prefetcher.next()
    prefetcher.stop()
    assert threading.active_count() == before


def test_a_prefetcher_can_be_stopped_by_its_own_thread():
    calls = []
    stopped = threading.Event()

    def produce():
        calls.append(threading.current_thread())
        if len(calls) == 2:
            prefetcher.stop()
            stopped.set()

    prefetcher = Prefetcher(produce, depth=1)
    prefetcher.next()
    assert stopped.wait(timeout=10)
    calls[0].join(timeout=10)
    assert not calls[0].is_alive()
    assert len(calls) == 2
