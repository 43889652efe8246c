"""The command that lists checkpoints, and the choice of one by its step."""

import jax.numpy as jnp
import pytest

from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.cli.main import main


@pytest.fixture
def run_folder(tmp_path):
    """A run with checkpoints of the steps 1 and 2, of which the first is the best."""
    (tmp_path / "config.yaml").write_text("name: test\n")
    store = CheckpointStore(tmp_path / "checkpoints", use_async=False)
    for step in (1, 2):
        store.save(step, {"params": {"kernel": jnp.ones((2, 3))}}, {"metadata": {"monitor": "loss"}})
        store.save_metrics(step, {"loss": float(step), "task": "a word"})
    store.close()
    return tmp_path


def damage(run_folder):
    file = run_folder / "checkpoints" / "checkpoint_2" / "params" / "manifest.ocdbt"
    file.write_bytes(file.read_bytes()[:-1])


def test_checkpoints_are_listed_with_metrics_and_validity(run_folder, capsys):
    assert main(["checkpoints", str(run_folder), "--verify"]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "saved", "MiB", "metrics", "state"]
    assert first.split()[0] == "1"
    assert "loss 1 " in first
    assert first.rstrip().endswith("best, valid")
    assert second.rstrip().endswith("latest, valid")


def test_a_corrupt_checkpoint_is_named_with_what_is_wrong(run_folder, capsys):
    damage(run_folder)
    assert main(["checkpoints", str(run_folder)]) == 0
    assert main(["checkpoints", str(run_folder), "--verify"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint_2 is corrupt: params/manifest.ocdbt has ")


def test_corrupt_checkpoints_that_were_renamed_are_listed(run_folder, capsys):
    damage(run_folder)
    store = CheckpointStore(run_folder / "checkpoints")
    assert store.select() == 1
    store.close()
    assert main(["checkpoints", str(run_folder)]) == 0
    assert "corrupt, kept as corrupt-checkpoint_2" in capsys.readouterr().out


def test_a_run_without_checkpoints_is_one_line(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("name: test\n")
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("There is no checkpoint in ")


@pytest.mark.parametrize("command", ["resume", "generate"])
def test_a_step_that_is_no_number_is_a_usage_error(run_folder, command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, str(run_folder), "--step", "last"])
    assert stop.value.code == 2
    assert "'last' is not a step: give a number; `xlstm-jax checkpoints` lists them" in capsys.readouterr().err
