"""Make Ctrl-C end a command even while the main thread is inside native code, such as XLA's compiler.

Python runs signal handlers between bytecode instructions of the main thread, so never during a compilation, which may
take minutes; and a `KeyboardInterrupt` raised in a callback from native code is printed and dropped. The C part of
Python's handler writes each signal number to a file descriptor immediately, and a thread can watch that descriptor.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

GRACE_SECONDS = 2.0
"""How long the main thread has to end by itself after Ctrl-C."""


@contextlib.contextmanager
def exit_on_ctrl_c(describe_exit: Callable[[], str] = lambda: "Stopped.") -> Iterator[None]:
    """End the process with exit code 130 if Ctrl-C does not end this context within two seconds.

    If another handler is installed for Ctrl-C, such as that of a training run, which finishes its step first, the
    process ends at a second Ctrl-C that arrives before the first was handled.

    Args:
        describe_exit: Returns the message to print to stderr when the process ends. It is called in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    has_ended = threading.Event()
    previous = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous_hook = sys.unraisablehook
    sys.unraisablehook = functools.partial(_report_unless_interrupt, previous_hook)
    threading.Thread(target=_watch, args=(reader, has_ended, describe_exit), name="ctrl-c", daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()
        sys.unraisablehook = previous_hook
        signal.set_wakeup_fd(previous)
        os.close(writer)  # The thread then reads the end of file and closes the other side.


def _report_unless_interrupt(report: Callable[[Any], Any], unraisable: Any) -> None:
    """Report an exception that Python cannot raise, as in a destructor, unless it is Ctrl-C, which ends the process."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        report(unraisable)


def _watch(reader: int, has_ended: threading.Event, describe_exit: Callable[[], str]) -> None:
    num_unhandled = 0
    with open(reader, "rb", buffering=0) as signal_numbers:
        while signal_number := signal_numbers.read(1):
            if signal_number[0] != signal.SIGINT:
                continue
            num_unhandled += 1
            is_python_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if (is_python_default and not has_ended.wait(GRACE_SECONDS)) or (
                num_unhandled > 1 and signal.getsignal(signal.SIGINT) != signal.SIG_DFL and not has_ended.is_set()
            ):
                _exit(describe_exit)


def _exit(describe_exit: Callable[[], str]) -> None:
    """Exit without finalising the interpreter, which would wait for the main thread."""
    try:
        sys.stderr.write(f"{describe_exit()}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    finally:
        os._exit(128 + signal.SIGINT)


def _do_not_write_to_the_parent() -> None:
    """Reset the file descriptor in a forked child: a terminal sends Ctrl-C to both, and the parent would count two."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_do_not_write_to_the_parent)
