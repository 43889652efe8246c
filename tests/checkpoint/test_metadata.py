"""Which changes of a config let a run go on."""

import dataclasses

import pytest
from checkpoint.states import ADAMW, CONFIG

from xlstm_jax.checkpoint.metadata import compare_configs
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM


def configs(model=CONFIG, optimizer=ADAMW):
    """Return the configs of a run as they are stored."""
    model_config = ModelConfig(model_class=XLSTM, parallel=model.parallel, model_config=model)
    return {"model": model_config.to_dict(), "optimizer": optimizer.to_dict()}


def test_equal_configs_do_not_differ():
    assert compare_configs(configs(), configs()) == []


def test_differences_are_shown_with_name_and_values():
    old = {"trainer": {"seed": 0, "callbacks": ({"every_n_steps": 1}, {"mode": "min"})}}
    new = {"trainer": {"seed": 1, "callbacks": ({"every_n_steps": 5},), "debug": True}}
    assert [str(difference) for difference in compare_configs(old, new)] == [
        "trainer.seed: 0 → 1",
        "trainer.callbacks.0.every_n_steps: 1 → 5",
        "trainer.callbacks.1.mode: min → absent",
        "trainer.debug: absent → True",
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("vocab_size", 64), ("num_blocks", 4), ("num_heads", 4), ("tie_weights", True), ("gate_soft_cap", None)],
)
def test_another_model_cannot_be_resumed(field, value):
    new = configs(model=dataclasses.replace(CONFIG, **{field: value}))
    assert [difference.forbids_resuming for difference in compare_configs(configs(), new)] == [True]


def test_another_optimizer_cannot_be_resumed():
    new = configs(optimizer=dataclasses.replace(ADAMW, name="lion"))
    assert [difference.forbids_resuming for difference in compare_configs(configs(), new)] == [True]


def test_how_a_model_is_run_and_trained_may_change():
    parallel = dataclasses.replace(CONFIG.parallel, fsdp_axis_size=8, remat=["Block"])
    model = dataclasses.replace(
        CONFIG,
        scan_blocks=False,
        dtype="bfloat16",
        chunk_size=16,
        dropout_rate=0.1,
        mlstm_backend="chunkwise",
        parallel=parallel,
    )
    differences = compare_configs(configs(), configs(model, dataclasses.replace(ADAMW, weight_decay=0.2, beta2=0.9)))
    assert len(differences) == 11
    assert not any(difference.forbids_resuming for difference in differences)


def test_settings_that_a_version_does_not_know_do_not_forbid_resuming():
    old = configs()
    del old["model"]["model_config"]["norm"]
    assert [difference.forbids_resuming for difference in compare_configs(old, configs())] == [False]


@pytest.mark.parametrize(("field", "value"), [("keep_logits", True), ("remat", "dots"), ("loss_chunk_size", 77)])
def test_a_setting_that_trades_memory_for_speed_can_be_changed(field, value):
    new = configs(model=dataclasses.replace(CONFIG, **{field: value}))
    assert [difference.forbids_resuming for difference in compare_configs(configs(), new)] == [False]
