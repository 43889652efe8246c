"""Every setting of a run is listed, with a type, a default and a description."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from test_architecture import config_classes, declared_fields

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose, groups
from xlstm_jax.recipes.settings import describe_fields, describe_type, find_settings, list_settings, suggest

pytestmark = pytest.mark.slow


def test_every_setting_has_a_description():
    assert [f"{each.config}: {each.key}" for each in list_settings() if not each.description] == []


def test_every_field_of_every_config_is_listed():
    listed = {each.config.split()[0] for each in list_settings()}
    with_fields = {config.name for config in config_classes() if list(declared_fields(config))}
    bases = {"DataConfig", "TextDataConfig", "TrainerConfig", "CallbackConfig", "LanguageModelConfig"}
    made_of_others = {"ModelConfig", "DataRecipe"}
    assert with_fields - listed - bases - made_of_others == set()


def test_every_key_of_every_packaged_choice_is_listed():
    unlisted = set()
    for experiment in groups()["experiment"]:
        for group, fields in compose([f"experiment={experiment}", "init_from=x"]).items():
            for name in fields if isinstance(fields, dict) and group not in ("data", "callbacks") else []:
                try:
                    find_settings(f"{group}.{name}")
                except ConfigError:
                    unlisted.add(f"{group}.{name}")
    assert unlisted == {"model.model_class"}


def test_a_setting_has_type_default_description_and_the_choices_that_set_it():
    (setting,) = find_settings("scheduler.warmup_steps")
    assert (setting.type, setting.default, setting.config) == ("int", "0", "SchedulerConfig")
    assert setting.description.startswith("Length of the linear warm-up")
    assert {"scheduler=cosine", "experiment=demo"} <= set(setting.set_in)


def test_a_part_of_a_key_finds_all_settings_below_it():
    assert {each.key for each in find_settings("trainer.bad_steps")} >= {"trainer.bad_steps.policy"}
    assert all(each.key.startswith("trainer.bad_steps.") for each in find_settings("trainer.bad_steps"))


def test_a_callback_of_the_packaged_choices_has_its_name():
    assert find_settings("callbacks.checkpoint.max_to_keep")[0].default == "1"


def test_an_unknown_name_suggests_the_settings_that_end_with_it():
    with pytest.raises(ConfigError, match=r"^lr: there is no such setting or group\. Did you mean 'scheduler\.lr'\?$"):
        find_settings("lr")
    assert suggest("schedule") == " Did you mean 'scheduler'?"


@pytest.mark.parametrize(
    ("annotation", "name"),
    [
        (int | None, "int | null"),
        (Path | str, "path | str"),
        (Literal["a", "b", None], "a | b | null"),
        (Sequence[str] | str, "list of str | str"),
        (dict[int, float], "map from int to float"),
        (Any, "any"),
    ],
)
def test_a_type_is_described_as_a_reader_of_settings_would_call_it(annotation, name):
    assert describe_type(annotation) == name


@dataclasses.dataclass
class Base:
    """A config with two fields."""

    first: int = 1
    """The first
    field."""
    second: int = 2
    """The second field."""


@dataclasses.dataclass
class Heir(Base):
    """A config that changes a default."""

    first: int = 3
    second: int = 4
    """Described anew."""


def test_a_field_without_a_docstring_inherits_it():
    assert dict(describe_fields(Heir)) == {"first": "The first field.", "second": "Described anew."}
