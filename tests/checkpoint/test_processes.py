"""Several processes write one checkpoint together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from checkpoint.states import assert_same, make_state, parts

import xlstm_jax
from xlstm_jax.checkpoint.loaders import own_states
from xlstm_jax.checkpoint.store import CheckpointStore

ROOT = Path(xlstm_jax.__file__).parents[1]
DEADLINE_SECONDS = 180


def test_two_processes_save_and_one_goes_on(tmp_path, caplog):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("one_of_two.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(index), str(port), str(tmp_path)],
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
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    store = CheckpointStore(tmp_path, read_only=True)
    assert_same(store.restore(3, parts(make_state(seed=1, dp=8))), parts(make_state(fsdp=8)))
    assert own_states(store.read_document(3, "data")["loaders"]) == {}
    assert "Resume with 2 processes" in caplog.text
    store.close()
