"""Results that a thread has ready before they are asked for."""

import queue
import threading
from collections.abc import Callable
from typing import Any

_SECONDS = 0.1
"""How soon a thread that nobody waits for notices that it is to stop."""


class Prefetcher:
    """Calls a function again and again in a thread, some results ahead.

    The thread starts when the first result is asked for, and ends when the function raises; what that was is raised in
    its turn, and whoever asks again starts a new thread.

    Args:
        produce: The function; nobody else may use what it uses until `stop` has returned.
        depth: How many results may wait.
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
        """End the thread, and forget the results that nobody has asked for."""
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
    """Be the thread; it knows nothing of the prefetcher, which can so be forgotten while it runs."""
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
