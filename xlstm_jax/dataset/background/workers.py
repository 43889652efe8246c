"""A pool of worker processes that end together with the process that started them.

Workers are started as new programs, not as forks: a script needs no main guard, and no state of JAX or of other threads
is duplicated. Each worker has a socket to its parent; when the parent ends for any reason, the socket closes and the
worker exits.
"""

import contextlib
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import cloudpickle

_TASKS_AHEAD = 2
"""The number of tasks that a worker holds: the current one and the next."""


@runtime_checkable
class Pending(Protocol):
    """A result that may not be available yet."""

    def result(self) -> Any:
        """Wait for the result, and return it or raise the error of the function."""
        ...


class WorkerPool:
    """Applies a function in worker processes. Only one thread at a time may call it.

    Args:
        function: The function; it is pickled, and so are its arguments and results.
        num_workers: The number of processes; 0 for a thread of this process.
        environment: Further environment variables of the workers.
    """

    def __init__(self, function: Callable[[Any], Any], num_workers: int, environment: dict[str, str] | None = None):
        self._function = function
        self._workers = [_Worker(function, environment or {}) for _ in range(num_workers)]
        self._thread = None if num_workers else ThreadPoolExecutor(1, thread_name_prefix="data-worker")
        self._finalizer = weakref.finalize(self, _close, self._workers, self._thread)
        self.num_ahead = _TASKS_AHEAD * max(num_workers, 1)
        """The number of tasks that keeps all workers busy."""

    def submit(self, task: Any) -> Pending:
        """Submit a task to the worker with the fewest."""
        if self._thread is not None:
            return self._thread.submit(self._function, task)
        return min(self._workers, key=lambda worker: len(worker.pending)).submit(task)

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results in the order of the tasks, which are consumed a few ahead of the results.

        Raises:
            RuntimeError: A worker has died. Errors of the function are raised unchanged.
        """
        ahead: deque[Pending] = deque()
        for task in tasks:
            ahead.append(self.submit(task))
            if len(ahead) == self.num_ahead:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def close(self) -> None:
        """Kill the workers at once; garbage collection of the pool does the same."""
        self._finalizer()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _close(workers: "list[_Worker]", thread: ThreadPoolExecutor | None) -> None:
    for worker in workers:
        worker.close()
    if thread is not None:
        thread.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A worker process, its socket, and its unanswered tasks in order."""

    def __init__(self, function: Callable[[Any], Any], environment: dict[str, str]):
        payload = cloudpickle.dumps(function)  # which includes functions defined in a script
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from xlstm_jax.dataset.background import workers; workers.serve()",
                str(theirs.fileno()),
            ],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_import_path(), **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to the parent only, which decides when its workers end.
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self._send(sys.path)
        self._send_bytes(payload)
        self.pending: deque[_Answer] = deque()

    def submit(self, task: Any) -> "_Answer":
        self._send(task)
        self.pending.append(_Answer(self))
        return self.pending[-1]

    def receive(self) -> None:
        """Wait for the answer to the oldest task."""
        try:
            outcome = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        self.pending.popleft().outcome = outcome

    def close(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _send(self, message: Any) -> None:
        self._send_bytes(pickle.dumps(message))

    def _send_bytes(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._lost() from error

    def _lost(self) -> RuntimeError:
        code = self._process.wait()
        cause = "it was killed, perhaps because memory ran out" if code == -9 else "see its messages above"
        return RuntimeError(f"The data worker with process id {self._process.pid} has ended with code {code}: {cause}.")


class _Answer:
    """The answer of a worker to a task, which arrives after those to earlier tasks."""

    def __init__(self, worker: _Worker):
        self._worker = worker
        self.outcome: tuple[bool, Any] | None = None

    def result(self) -> Any:
        while self.outcome is None:
            self._worker.receive()
        is_result, value = self.outcome
        if is_result:
            return value
        raise value


def serve() -> None:
    """Run a worker; the first argument is the file descriptor of its socket."""
    connection = Connection(int(sys.argv[1]))
    sys.path[:] = connection.recv()
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=[connection, messages], daemon=True).start()
    function = pickle.loads(messages.get())
    with contextlib.suppress(ConnectionError):  # The parent has ended, or has closed the pool.
        while True:
            connection.send(_attempt(function, pickle.loads(messages.get())))


def _read_messages(connection: Connection, messages: "queue.SimpleQueue[bytes]") -> None:
    """Receive messages so that the parent never blocks, and exit at once when the parent has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            messages.put(connection.recv_bytes())
    os._exit(0)


def _attempt(function: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    try:
        return True, function(task)
    except Exception as error:
        where = f"In a data worker:\n{traceback.format_exc()}"
        error.add_note(where)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return False, RuntimeError(where)
        return False, error


def _import_path() -> dict[str, str]:
    """Return the environment in which a worker can import this package, even if it is not installed."""
    package_parent = str(Path(__file__).resolve().parents[3])
    return {"PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))}
