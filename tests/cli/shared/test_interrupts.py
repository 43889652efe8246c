"""Ctrl-C ends a command at once, whatever the main thread is busy with."""

import os
import signal
import subprocess
import sys
import time

import pytest

from xlstm_jax.cli.shared.interrupts import exit_on_ctrl_c

BUSY = {
    "a library that runs no Python": "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)",
    "Python": "time.sleep(60)",
    "a callback that drops errors": "swallow(); time.sleep(60)",
    "a destructor": "Slow(); time.sleep(60)",
}
PROGRAM = """
import hashlib, signal, sys, time
from xlstm_jax.cli.shared.interrupts import exit_on_ctrl_c

signal.signal(signal.SIGINT, signal.default_int_handler)  # It may be ignored where tests run in the background.

def swallow():
    try:
        time.sleep(60)
    except BaseException:
        print("swallowed", flush=True)

class Slow:
    def __del__(self):
        time.sleep(60)

try:
    with exit_on_ctrl_c(lambda: "Stopped by force."):
        {setup}
        print("ready", flush=True)
        {busy}
except KeyboardInterrupt:
    sys.exit("Stopped by itself.")
"""


def interrupt(busy: str, setup: str = "", num_interrupts: int = 1) -> tuple[int, str]:
    """Send Ctrl-C to a busy program, and return its exit code and what it wrote to stderr."""
    command = [sys.executable, "-c", PROGRAM.format(busy=busy, setup=setup)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.1)
        for _ in range(num_interrupts):
            program.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, errors = program.communicate(timeout=60)
        return program.returncode, errors
    finally:
        program.kill()


@pytest.mark.parametrize("name", ["a library that runs no Python", "a callback that drops errors", "a destructor"])
def test_ctrl_c_ends_a_command_that_python_cannot_interrupt(name):
    code, errors = interrupt(BUSY[name])
    assert (code, errors) == (130, "Stopped by force.\n")


def test_a_command_that_python_can_interrupt_ends_by_itself():
    code, errors = interrupt(BUSY["Python"])
    assert (code, errors) == (1, "Stopped by itself.\n")


def test_where_ctrl_c_is_handled_only_a_second_one_that_comes_too_soon_ends_a_command():
    handled = "signal.signal(signal.SIGINT, lambda *_: print('handled', flush=True))"
    busy = "hashlib.pbkdf2_hmac('sha256', b'', b'', 4 * 10**6)"
    code, errors = interrupt(busy, setup=handled)
    assert (code, errors) == (0, "")
    code, errors = interrupt(BUSY["a library that runs no Python"], setup=handled, num_interrupts=2)
    assert (code, errors) == (130, "Stopped by force.\n")


def test_a_forked_process_does_not_write_to_its_parent():
    program = """
import os, signal
from xlstm_jax.cli.shared.interrupts import exit_on_ctrl_c
with exit_on_ctrl_c():
    child = os.fork()
    if child == 0:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    raise SystemExit(os.waitpid(child, 0)[1])
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_an_earlier_wakeup_file_descriptor_is_restored():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    previous = signal.set_wakeup_fd(writer)
    try:
        with exit_on_ctrl_c():
            pass
        assert signal.set_wakeup_fd(previous) == writer
    finally:
        signal.set_wakeup_fd(previous)
        os.close(reader)
        os.close(writer)
