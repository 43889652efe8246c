"""What Hydra is about to run is known before it runs."""

from pathlib import Path

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose, register_run_id
from xlstm_jax.recipes.preview import preview_run, preview_sweep


@pytest.fixture(autouse=True)
def run_id():
    register_run_id()


def test_a_run_is_what_is_composed_in_the_folder_that_was_chosen():
    folder, settings = preview_run(["batch_size=3", "hydra.run.dir=here/${name}"])
    assert (folder, settings) == (Path("here/run"), compose(["batch_size=3"]))


def test_a_sweep_is_every_combination_of_its_values():
    words = ["batch_size=3,5", "optimizer=adamw,muon", "trainer.seed=${hydra:job.num}", "hydra.sweep.dir=there"]
    folder, runs = preview_sweep(words)
    assert folder == Path("there")
    assert [run["batch_size"] for run in runs] == [3, 3, 5, 5]
    assert [run["trainer"]["seed"] for run in runs] == [0, 1, 2, 3]
    assert runs[0]["optimizer"] != runs[1]["optimizer"]


def test_a_sweep_may_be_part_of_a_choice(tmp_path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\nhydra: {sweeper: {params: {batch_size: '3,5'}}}\n"
    (tmp_path / "experiment/mine.yaml").write_text(text)
    _, runs = preview_sweep(["experiment=mine"], tmp_path)
    assert [run["batch_size"] for run in runs] == [3, 5]


def test_values_that_the_sweeper_cannot_take_are_a_wrong_setting():
    with pytest.raises(ConfigError, match="does not support sweep type"):
        preview_sweep(["scheduler.lr=interval(1,2)"])
