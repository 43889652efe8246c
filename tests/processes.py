"""Two processes that find each other, for tests of what many hosts do."""

import os
import pathlib
import socket
import subprocess
import sys

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
