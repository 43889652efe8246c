"""The runs of a sweep, and the folder of each, are known before the first one starts."""

from pathlib import Path

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose, compose_run, register_run_id
from xlstm_jax.recipes.sweep import compose_sweep


@pytest.fixture(autouse=True)
def run_id():
    register_run_id()


def test_a_run_is_what_is_composed_in_the_folder_that_was_chosen():
    run = compose_run(["batch_size=3", "hydra.run.dir=here/${name}"])
    assert (run.folder, run.resolved) == (Path("here/run"), compose(["batch_size=3"]))


def test_a_sweep_is_every_combination_of_its_values():
    words = ["batch_size=3,5", "optimizer=adamw,muon", "trainer.seed=${hydra:job.num}", "hydra.sweep.dir=there"]
    folder, compositions = compose_sweep(words)
    runs = [composition.resolved for composition in compositions]
    assert folder == Path("there")
    assert [run["batch_size"] for run in runs] == [3, 3, 5, 5]
    assert [run["trainer"]["seed"] for run in runs] == [0, 1, 2, 3]
    assert runs[0]["optimizer"] != runs[1]["optimizer"]


def test_a_sweep_may_be_part_of_a_choice(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra: {sweeper: {params: {batch_size: '3,5'}}}\n"
    (tmp_path / "experiment/mine.yaml").write_text(text)
    _, runs = compose_sweep(["experiment=mine"], tmp_path)
    assert [run.resolved["batch_size"] for run in runs] == [3, 5]


def test_values_that_the_sweeper_cannot_take_are_a_wrong_setting():
    with pytest.raises(ConfigError, match="does not support sweep type"):
        compose_sweep(["scheduler.lr=interval(1,2)"])
