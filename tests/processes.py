"""Processes for tests: two that find each other, as many hosts do, and what becomes of others."""

import os
import pathlib
import socket
import subprocess
import sys
import time

TESTS = pathlib.Path(__file__).parent
DEADLINE_SECONDS = 300


def run_two(script: pathlib.Path, *arguments: str, python_options: tuple[str, ...] = ()) -> tuple[list[int], str]:
    """Run a script as `script INDEX PORT ...` in two processes to their ends.

    Args:
        script: The script, which can import from the tests.
        *arguments: What it gets after its index and the port on which to meet.
        python_options: What Python gets before the script.

    Returns:
        The exit codes, and what both said.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    processes = [
        subprocess.Popen(
            [sys.executable, *python_options, str(script), str(index), str(port), *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(outputs)


def wait_until(condition, seconds=60):
    """Wait until a condition holds; that it never does is a failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_running(process_id):
    """Tell whether a process has not ended."""
    try:
        return pathlib.Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
