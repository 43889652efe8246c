"""A run that is killed while it saves leaves only whole checkpoints behind."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoint import saving_forever
from checkpoint.states import assert_same

import xlstm_jax
from xlstm_jax.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slow

NUM_KILLS = 3
DEADLINE_SECONDS = 120


def save_until_killed(folder, mode, delay):
    """Kill a process that saves, some time after it has come further than the one before."""
    progress = folder / "progress"
    progress.unlink(missing_ok=True)
    command = [sys.executable, "-W", "error", saving_forever.__file__, str(folder), mode]
    environment = {**os.environ, "PYTHONPATH": str(Path(xlstm_jax.__file__).parents[1])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    start = time.monotonic()
    while not progress.exists() and process.poll() is None and time.monotonic() - start < DEADLINE_SECONDS:
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    _, errors = process.communicate()
    assert progress.exists(), errors.decode()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_every_checkpoint_that_is_listed_is_whole(tmp_path, mode):
    generator = random.Random(mode)
    latest = 0
    for _ in range(NUM_KILLS):
        save_until_killed(tmp_path, mode, delay=generator.uniform(0, 0.3))
        store = CheckpointStore(tmp_path, read_only=True)
        assert store.latest() >= max(latest, int((tmp_path / "progress").read_text()))
        for step in store.steps():
            assert_same(store.restore(step, saving_forever.arrays(0)), saving_forever.arrays(step))
            assert store.read_metadata(step)["step"] == step
            assert store.read_document(step, "data") == {"loaders": {"train": [step]}}
        latest = store.latest()
        store.close()
