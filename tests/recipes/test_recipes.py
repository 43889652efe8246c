"""Every recipe composes, has a header that says what it is, and lowers on its mesh; two are compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import TESTS

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import SyntheticDataConfig
from xlstm_jax.distributed.mesh_utils import initialize_mesh
from xlstm_jax.models.cost import model_cost
from xlstm_jax.models.xlstm.config import SIZES, published
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.compiled import compile_here
from xlstm_jax.planning.setup import Setup
from xlstm_jax.recipes.compose import GROUPS_FOLDER, compose, groups
from xlstm_jax.recipes.run_config import RunConfig, build_run

pytestmark = pytest.mark.slow

EXPERIMENTS = sorted(groups()["experiment"])
PUBLISHED = [name for name in EXPERIMENTS if name.startswith(("xlstm", "llama", "paper"))]
NUM_DEVICES = {"xlstm_7b": 128, "xlstm_7b_long": 128}
NEEDED = {"xlstm_7b_long": ["init_from=some/run"]}
"""Settings that a recipe leaves to its user."""
NUM_PARAMETERS = {
    "paper_125m": 163.8,
    "paper_350m": 409.3,
    "paper_350m_7_1": 408.4,
    "paper_350m_llama": 406.6,
    "xlstm_7b": 6865.4,
    "llama_160m": 162.2,
    "llama_1_4b": 1420.4,
}
"""In millions, as they are published."""


def run_of(name: str) -> RunConfig:
    return build_run(compose([f"experiment={name}", *NEEDED.get(name, [])]))


def setup_of(name: str, num_devices: int | None = None) -> Setup:
    return run_of(name).setup(num_devices or NUM_DEVICES.get(name, 32))


def lower(name: str) -> int:
    """Lower the training step of a recipe, without its arrays, and count its matrix products."""
    traced = AbstractTrainer.from_setup(setup_of(name)).traced
    return traced.lower(lowering_platforms=("cpu",)).as_text().count("dot_general")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_recipe_composes_under_its_own_name(name):
    assert run_of(name).name == name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_recipe_composes_with_synthetic_data(name):
    run = build_run(compose([f"experiment={name}", "data=synthetic", *NEEDED.get(name, [])]))
    assert isinstance(run.data.first, SyntheticDataConfig)
    assert run.data.first.global_batch_size == run.batch_size


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_recipe_has_a_mesh_on_any_number_of_devices(name, num_devices):
    parallel = run_of(name).model.parallel
    assert initialize_mesh(parallel, np.array(jax.devices()[:num_devices])).size == num_devices


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("group", groups()["parallel"])
def test_every_parallel_group_has_a_mesh_or_names_the_setting_to_change(group, num_devices):
    parallel = build_run(compose([f"parallel={group}"])).model.parallel
    if group == "tensor" and num_devices == 1:
        with pytest.raises(ConfigError, match=r"for 1 device: .*\. Set model_axis_size=1"):
            initialize_mesh(parallel, np.array(jax.devices()[:1]))
    else:
        assert initialize_mesh(parallel, np.array(jax.devices()[:num_devices])).size == num_devices


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_recipe_says_command_hardware_result_and_source(name):
    text = Path(GROUPS_FOLDER, "experiment", f"{name}.yaml").read_text()
    assert re.search(rf"^# Command   .*xlstm-jax train experiment={name}\b", text, re.MULTILINE)
    for word in ("Hardware", "Expected", "Source"):
        assert re.search(rf"^# {word} +\S", text, re.MULTILINE), word
    assert max(map(len, text.splitlines())) <= 120


def test_every_published_recipe_lowers_on_its_mesh():
    """In a process of its own: checks of annotations would make tracing several times as long."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [TESTS.parent, TESTS, TESTS / "recipes"]))}
    code = "import test_recipes; [print(test_recipes.lower(name), name, flush=True) for name in test_recipes.PUBLISHED]"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=900, check=True
    )
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [name for _, name in lines] == PUBLISHED
    assert all(int(count) > 20 for count, _ in lines)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_the_number_of_parameters_is_the_published_one(name):
    shape = run_of(name).model.model_config
    assert round(model_cost(shape, sequence_length=2048).parameters / 1e6, 1) == NUM_PARAMETERS[name]


@pytest.mark.parametrize("size", SIZES)
def test_recipes_have_the_published_sizes(size):
    group = size.replace("xLSTM-", "xlstm_").replace(".", "_").lower()
    shape = build_run(compose([f"model={group}", "data=synthetic"])).model.model_config
    expected = published(size, dtype="bfloat16", head_dtype="bfloat16", parallel=shape.parallel)
    assert shape == expected


def test_every_size_of_the_scaling_laws_has_a_twin_that_differs_in_its_model_alone():
    for size in ("160m", "400m", "830m", "1_4b", "2_7b"):
        xlstm, llama = (compose([f"experiment={kind}_{size}"]) for kind in ("xlstm", "llama"))
        differing = [key for key in xlstm if xlstm[key] != llama[key]]
        assert differing == ["name", "model"]
        ours, theirs = (
            model_cost(run_of(f"{kind}_{size}").model.model_config, sequence_length=8192).parameters
            for kind in ("xlstm", "llama")
        )
        assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.parametrize("name", ["xlstm_160m", "llama_160m"])
def test_two_recipes_compile_on_the_devices_at_hand(name, unchecked_shapes):
    memory = compile_here(setup_of(name, num_devices=8))
    assert memory.peak > 0
