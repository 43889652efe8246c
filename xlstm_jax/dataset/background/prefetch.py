"""Prefetch results in a thread."""

import queue
import threading
from collections.abc import Callable
from typing import Any

_SECONDS = 0.1
"""The interval at which a blocked thread checks whether it should stop."""


class Prefetcher:
    """Calls a function repeatedly in a thread, some results ahead of the consumer.

    The thread starts with the first call of `next` and ends when the function raises. `next` raises that error in its
    turn, and the call after it starts a new thread.

    Args:
        produce: The function; its resources must not be used elsewhere until `stop` has returned.
        depth: The largest number of waiting results.
    """

    def __init__(self, produce: Callable[[], Any], depth: int):
        self._produce = produce
        self._depth = depth
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether there is a thread."""
        return self._thread is not None

    def next(self) -> Any:
        """Return the next result."""
        if self._thread is None:
            self._start()
        result, error = self._results.get()
        if error is not None:
            self.stop()
            raise error
        return result

    def stop(self) -> None:
        """End the thread, and discard the waiting results."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None

    def _start(self) -> None:
        self._stopped = threading.Event()
        self._results: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(self._depth)
        arguments = (self._produce, self._results, self._stopped)
        self._thread = threading.Thread(target=_work, args=arguments, name="prefetch", daemon=True)
        self._thread.start()


def _work(produce: Callable[[], Any], results: queue.Queue, stopped: threading.Event) -> None:
    """Run the thread, without a reference to the prefetcher, which can then be garbage-collected."""
    error = None
    while error is None and not stopped.is_set():
        try:
            outcome = produce(), None
        except BaseException as raised:
            error = raised
            outcome = None, raised
        while not stopped.is_set():
            try:
                results.put(outcome, timeout=_SECONDS)
                break
            except queue.Full:
                continue
