"""What the configs of Hugging Face models have in common: required sizes, synonyms, values that are not converted."""

from collections.abc import Mapping, Sequence
from typing import Any

from xlstm_jax.configs import ConfigError


def check_config(config: Mapping[str, Any], model_type: str, sizes: Sequence[str]) -> None:
    """Raise unless a config is of a model type and has its sizes.

    Other fields may be missing and then have the defaults of `transformers`; sizes that are missing would be those of
    some large model.

    Args:
        config: The fields of a `config.json`.
        model_type: What its `model_type` must be, if it has one.
        sizes: The fields that it must have; several names for one field are divided by `/`.
    """
    found = config.get("model_type", model_type)
    if found != model_type:
        raise ConfigError(f"model_type is {found!r}, but must be {model_type!r}: the config is that of another model.")
    missing = [name for name in sizes if all(config.get(alias) is None for alias in name.split("/"))]
    if missing:
        raise ConfigError(f"The config has no {', '.join(missing)}: give the config.json of a {model_type} model.")


def check_values(config: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    """Raise unless fields, where a config has them, have the only value that is converted."""
    for name, possible in needed.items():
        given = config.get(name, possible)
        if given != possible:
            raise ConfigError(f"{name} is {given!r}, but only models with {possible!r} can be converted.")


def same_of(config: Mapping[str, Any], names: str) -> Any:
    """Return the value that a config gives under several names for one thing, divided by `/`."""
    values = {name: config[name] for name in names.split("/") if config.get(name) is not None}
    if len(set(values.values())) > 1:
        given = " and ".join(f"{name} {value!r}" for name, value in values.items())
        raise ConfigError(f"The config has {given}, which are names for the same number: leave the wrong one out.")
    return next(iter(values.values()))
