"""Which settings a resumed run may change."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from checkpoint.states import ADAMW, CONFIG
from settings import of_models

from xlstm_jax.checkpoint.metadata import compare_configs
from xlstm_jax.configs import fixed_settings
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM


def configs(model=CONFIG, optimizer=ADAMW):
    """Return the configs of a run."""
    return {
        "model": ModelConfig(model_class=XLSTM, parallel=model.parallel, model_config=model),
        "optimizer": optimizer,
    }


def differences(model=CONFIG, optimizer=ADAMW, without=()):
    """Compare a stored run, without some of its settings, with a run under other configs."""
    old, new = ({name: each.to_dict() for name, each in run.items()} for run in (configs(), configs(model, optimizer)))
    for field in without:
        del old["model"]["model_config"][field]
    fixed = [
        setting
        for name, config in configs(model, optimizer).items()
        for setting in fixed_settings(config, name, may_change=name != "model")
    ]
    return compare_configs(old, new, fixed)


def test_equal_configs_do_not_differ():
    assert differences() == []


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
    (difference,) = differences(model=dataclasses.replace(CONFIG, **{field: value}))
    assert difference.forbids_resuming


def test_another_optimizer_cannot_be_resumed():
    (difference,) = differences(optimizer=dataclasses.replace(ADAMW, name="lion"))
    assert difference.forbids_resuming


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
    found = differences(model, dataclasses.replace(ADAMW, weight_decay=0.2, beta2=0.9))
    assert len(found) == 11
    assert not any(difference.forbids_resuming for difference in found)


def test_settings_that_a_version_does_not_know_do_not_forbid_resuming():
    (difference,) = differences(without=["norm"])
    assert not difference.forbids_resuming


def test_a_declaration_holds_for_a_sequence_as_a_whole():
    old, new = ({"model": {"parts": [{"size": size}]}} for size in (1, 2))
    assert compare_configs(old, new, ["model.parts"])[0].forbids_resuming


def changeable_settings():
    """The settings of models that are declared to be free, with other values for them.

    `scan_blocks` changes the layout of the parameters in memory, see test_layout.py, and a value other than `auto` of
    `attention_backend` needs a GPU.
    """
    for case in of_models.MODELS:
        (field,) = (field for field in dataclasses.fields(case.config_class) if field.name == case.field)
        if field.metadata.get("may_change_on_resume") and case.field not in ("scan_blocks", "attention_backend"):
            yield case


@pytest.mark.parametrize("case", list(changeable_settings()), ids=lambda case: case.name)
def test_a_setting_that_may_change_on_resume_keeps_names_and_shapes_of_all_parameters(case):
    def shapes(**fields):
        model = of_models.CLASSES[case.config_class](case.config_class(**fields))
        variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
        return jax.tree.map(lambda leaf: leaf.shape, variables)

    assert shapes(**case.base | {case.field: case.value}) == shapes(**case.base)
