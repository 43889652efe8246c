"""A run that was ended in any way and started again gives the numbers of one that was not."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from trainer.runs import losses

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
NUM_STEPS = 14
ENDINGS = {
    "SIGTERM in step 7": ("SIGTERM", 7, 143),
    "SIGINT in step 2": ("SIGINT", 2, 130),
    "SIGUSR2 in step 5, for which another program waits": ("SIGUSR2", 5, 77),
    "kill -9 in step 8": ("kill", 8, -signal.SIGKILL),
    "kill -9 before the first checkpoint": ("kill", 1, -signal.SIGKILL),
    "kill -9 as the second save begins": ("save", 200, -signal.SIGKILL),
    "kill -9 20 ms into the third save": ("save", 320, -signal.SIGKILL),
    "kill -9 in the second validation": ("validation", 6, -signal.SIGKILL),
    "an exception in a callback": ("exception", 11, 1),
}


def run(folder, *options):
    """Run the script to its end, whatever that is."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])}
    command = [sys.executable, str(HERE / "resumable_run.py"), str(folder), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def numbers(folder):
    """Return the final state, the losses of all steps, and those of all validations."""
    with np.load(folder / "state.npz") as state:
        return dict(state), losses(folder), losses(folder, "loss", mode="val")


def whole_checkpoints(folder):
    """Return the folders of all checkpoints but those that were being written, from the oldest to the newest."""
    folders = [path for path in (folder / "checkpoints").iterdir() if path.name.rpartition("_")[2].isdecimal()]
    return sorted(folders, key=lambda path: int(path.name.rpartition("_")[2]))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    result = run(folder)
    assert result.returncode == 0, result.stderr
    return numbers(folder)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_was_ended_gives_the_same_numbers_bit_for_bit(ending, uninterrupted, tmp_path):
    how, at, code = ENDINGS[ending]
    ended = run(tmp_path, "--end", how, "--at", str(at))
    assert ended.returncode == code, ended.stderr
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr
    state, all_losses, val_losses = numbers(tmp_path)
    expected_state, expected_losses, expected_val_losses = uninterrupted
    assert all_losses == expected_losses
    assert list(all_losses) == list(range(1, NUM_STEPS + 1))
    assert val_losses == expected_val_losses
    assert list(val_losses) == [4, 8, 12, 14]
    for name, expected in expected_state.items():
        np.testing.assert_array_equal(state[name], expected, err_msg=name)
    if how in ("SIGTERM", "SIGINT", "SIGUSR2"):
        assert json.loads((tmp_path / "started_at.json").read_text()) == at


def test_a_run_whose_newest_checkpoint_is_corrupt_gives_the_same_numbers_from_the_one_before(uninterrupted, tmp_path):
    assert run(tmp_path, "--end", "kill", "--at", "8").returncode == -signal.SIGKILL
    checkpoints = whole_checkpoints(tmp_path)
    before, newest = (int(path.name.rpartition("_")[2]) for path in checkpoints[-2:])
    largest = max(checkpoints[-1].rglob("params/**/d/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    again = run(tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "started_at.json").read_text()) == before
    assert (tmp_path / "checkpoints" / f"corrupt-checkpoint_{newest}").is_dir()
    state, all_losses, val_losses = numbers(tmp_path)
    expected_state, expected_losses, expected_val_losses = uninterrupted
    assert (all_losses, val_losses) == (expected_losses, expected_val_losses)
    for name, expected in expected_state.items():
        np.testing.assert_array_equal(state[name], expected, err_msg=name)


def test_a_run_whose_checkpoints_are_all_corrupt_does_not_start_anew(tmp_path):
    assert run(tmp_path, "--end", "kill", "--at", "8").returncode == -signal.SIGKILL
    for checkpoint in whole_checkpoints(tmp_path):
        shutil.rmtree(checkpoint / "step")
    for _ in range(2):
        again = run(tmp_path)
        assert again.returncode == 1
        assert "CorruptCheckpointError" in again.stderr.splitlines()[-1]
    assert {path.name.partition("-")[0] for path in (tmp_path / "checkpoints").iterdir()} == {"corrupt"}


def test_rows_that_are_means_over_steps_are_the_same(tmp_path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    assert run(whole, "--log-every", "4").returncode == 0
    assert run(split, "--log-every", "4", "--end", "SIGTERM", "--at", "6").returncode == 143
    assert run(split, "--log-every", "4").returncode == 0
    assert losses(split) == losses(whole)
    assert list(losses(whole)) == [4, 8, 12]


def test_a_run_goes_on_on_another_mesh(uninterrupted, tmp_path):
    ended = run(tmp_path, "--mesh", "dp2-fsdp2-tp2", "--end", "SIGTERM", "--at", "7")
    assert ended.returncode == 143, ended.stderr
    again = run(tmp_path, "--mesh", "dp8")
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "started_at.json").read_text()) == 7
    state, all_losses, _ = numbers(tmp_path)
    expected_state, expected_losses, _ = uninterrupted
    np.testing.assert_allclose(list(all_losses.values()), list(expected_losses.values()), rtol=1e-5)
    for name, expected in expected_state.items():
        error = np.linalg.norm(state[name].astype(np.float64) - expected)
        assert error <= 1e-5 * np.linalg.norm(expected), f"{name}: {error}"
