"""The section `data` becomes the sets that a run trains and validates on."""

import re
from pathlib import Path
from typing import Any

import pytest

import xlstm_jax
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.data import DataRecipe, read_data

COMMAND_LINE = Path(xlstm_jax.__file__).parents[1] / "docs" / "how-to" / "command-line.md"
PREPARED = ("data=prepared", "data.data_path=x")


def data_of(*overrides: str) -> DataRecipe:
    return read_data(compose(overrides)["data"])


@pytest.fixture
def documented_settings(tmp_path) -> dict[str, Any]:
    """The settings of the mixture in the how-to guide, from the file that the guide names."""
    guide = COMMAND_LINE.read_text()
    (block,) = re.findall(
        r"```yaml\n(# @package _global_\n# mine/experiment/web_and_code\.yaml.*?)```", guide, re.DOTALL
    )
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "web_and_code.yaml").write_text(block)
    return compose(["experiment=web_and_code"], tmp_path)


@pytest.fixture
def documented(documented_settings) -> DataRecipe:
    """The data of the mixture in the how-to guide."""
    return read_data(documented_settings["data"])


def test_the_documented_mixture_has_the_sets_and_weights_of_the_guide(documented):
    assert {config.name: str(config.data_path) for config in documented.train} == {
        "web": "data/web",
        "code": "data/code",
    }
    assert documented.weights == [0.9, 0.1]
    assert documented.weights_at_steps == {50_000: [0.7, 0.3]}


def test_the_documented_validation_sets_have_the_packing_that_all_of_them_share(documented):
    found = {name: (str(config.data_path), config.packing) for name, config in documented.validation.items()}
    assert found == {"web": ("data/web", "first_fit"), "code": ("data/code", "first_fit")}


def test_the_documented_checkpoints_monitor_one_of_the_validation_sets(documented, documented_settings):
    name, _, metric = documented_settings["callbacks"]["checkpoint"]["monitor"].partition("_")
    assert name in documented.validation
    assert metric == "loss"


def test_a_field_that_is_a_mapping_is_no_validation_set():
    (validation,) = data_of(*PREPARED, "data.validation.batch_rampup_factors={0: 0.5}").validation.items()
    assert validation[0] == "validation"
    assert validation[1].batch_rampup_factors == {0: 0.5}


def test_a_field_of_a_validation_set_replaces_the_one_that_the_sets_share():
    data = data_of(*PREPARED, "data.validation={a: {packing: none}, b: {}}")
    assert [config.packing for config in data.validation.values()] == ["none", "first_fit"]


def test_a_shared_field_that_all_validation_sets_replace_is_a_mistake():
    with pytest.raises(
        ConfigError, match=r"^data\.validation\.packing has no effect, as it is replaced by data\.valid"
    ):
        data_of(*PREPARED, "data.validation={a: {packing: none}, b: {packing: none}}")


def test_an_unknown_field_of_a_validation_set_is_named_with_its_set():
    with pytest.raises(ConfigError, match=r"^data\.validation\.a\.splt: .* Did you mean 'split'"):
        data_of(*PREPARED, "data.validation={a: {splt: test}}")
