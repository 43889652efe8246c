"""Settings are composed from groups, experiments and overrides."""

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose, compose_run
from xlstm_jax.recipes.run import write_settings

EXPERIMENT = """# @package _global_
defaults:
  - override /optimizer: muon
  - override /data: synthetic
  - override /callbacks: [default, samples]
optimizer: {weight_decay: 0.3, muon_exclude: [embed]}
scheduler: {lr: 0.5}
data: {num_batches: 7}
callbacks:
  checkpoint: {every_n_steps: 190}
  samples: {max_length: 96}
  average: {_target_: xlstm_jax.trainer.callbacks.ema.ParameterEMAConfig}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/mine.yaml").write_text(EXPERIMENT)
    return tmp_path


def test_a_choice_on_the_command_line_drops_what_the_experiment_set_for_another_choice(folder):
    composed = compose(["experiment=mine", "optimizer=adamw", "data=formal_task"], folder)
    assert composed["optimizer"] == compose(["optimizer=adamw"])["optimizer"]
    assert composed["data"] == compose(["data=formal_task"])["data"]
    assert composed["scheduler"]["lr"] == 0.5


def test_the_choice_of_the_experiment_keeps_its_settings(folder):
    assert compose(["experiment=mine", "optimizer=muon"], folder) == compose(["experiment=mine"], folder)


def test_settings_on_the_command_line_hold_for_the_new_choice(folder):
    composed = compose(["optimizer.weight_decay=0.7", "experiment=mine", "optimizer=adamw"], folder)
    assert composed["optimizer"] == {**compose(["optimizer=adamw"])["optimizer"], "weight_decay": 0.7}


def test_callbacks_that_are_still_chosen_keep_the_settings_of_the_experiment(folder):
    callbacks = compose(["experiment=mine", "callbacks=[default,watchdog]"], folder)["callbacks"]
    assert callbacks["checkpoint"]["every_n_steps"] == 190
    chosen = compose(["callbacks=[default,watchdog]"])["callbacks"]
    assert callbacks.keys() == {*chosen, "average"}


def test_dropped_settings_are_reported(folder):
    (sentence,) = compose_run(["experiment=mine", "optimizer=adamw"], folder).remarks
    assert sentence == (
        "optimizer=adamw replaces the choice of the experiment, and drops its optimizer.muon_exclude, "
        "optimizer.weight_decay."
    )


@pytest.mark.parametrize(
    ("word", "meant"),
    [("demo", "experiment=demo"), ("muon", "optimizer=muon"), ("fsdp", "parallel=fsdp")],
)
def test_a_choice_without_its_group_is_suggested_with_it(word, meant):
    with pytest.raises(ConfigError, match=rf"^'{word}' is no key=value or group=choice\. Did you mean '{meant}'\?$"):
        compose([word])


def test_nothing_is_reported_where_nothing_is_dropped(folder):
    assert compose_run(["experiment=demo", "optimizer=adamw"]).remarks == ()
    assert compose_run(["optimizer=adamw", "batch_size=3"]).remarks == ()


@pytest.fixture
def earlier_run(tmp_path):
    """The folder of a run with a model of its own."""
    write_settings(compose(["model=xlstm_demo", "model.num_blocks=3"]), tmp_path / "earlier")
    return tmp_path / "earlier"


def test_a_run_that_starts_from_another_one_takes_over_its_model(earlier_run):
    composition = compose_run([f"init_from={earlier_run}", "batch_size=3"])
    assert composition.resolved["model"] == compose(["model=xlstm_demo", "model.num_blocks=3"])["model"]
    assert composition.remarks == (
        f"The settings of the model are those of {earlier_run}, whose parameters it starts from.",
    )


def test_settings_of_the_model_hold_beside_those_that_it_takes_over(earlier_run):
    changed = compose([f"init_from={earlier_run}", "model.dropout_rate=0.1", "~model.num_heads"])["model"]
    model = compose(["model=xlstm_demo", "model.num_blocks=3", "model.dropout_rate=0.1", "~model.num_heads"])["model"]
    assert changed == model


@pytest.mark.parametrize("choice", ["model=xlstm_tiny", "experiment=demo"])
def test_a_chosen_model_is_not_replaced_by_that_of_another_run(earlier_run, choice):
    composition = compose_run([f"init_from={earlier_run}", choice])
    assert composition.resolved["model"] == compose([choice])["model"]
    assert composition.remarks == ()


def test_a_broken_settings_file_of_another_run_is_reported(earlier_run):
    (earlier_run / "config.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match=r"^init_from: .*config\.yaml is not valid YAML"):
        compose([f"init_from={earlier_run}"])
