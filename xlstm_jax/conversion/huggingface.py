"""Checks that all conversions of Hugging Face configs share: required sizes, synonyms, unsupported values."""

from collections.abc import Mapping, Sequence
from typing import Any

from xlstm_jax.configs import ConfigError


def check_config(config: Mapping[str, Any], model_type: str, sizes: Sequence[str]) -> None:
    """Raise unless a config has the given model type and all sizes.

    Other fields may be missing and then have the defaults of `transformers`; the defaults of sizes are those of some
    large model.

    Args:
        config: The fields of a `config.json`.
        model_type: The required `model_type`, if the config has one.
        sizes: The required fields; several names of one field are separated by `/`.
    """
    found = config.get("model_type", model_type)
    if found != model_type:
        raise ConfigError(f"model_type is {found!r}, but must be {model_type!r}: the config is that of another model.")
    missing = [name for name in sizes if all(config.get(alias) is None for alias in name.split("/"))]
    if missing:
        raise ConfigError(f"The config has no {', '.join(missing)}: give the config.json of a {model_type} model.")


def check_values(config: Mapping[str, Any], needed: Mapping[str, Any]) -> None:
    """Raise unless the fields that a config has are set to the only supported value."""
    for name, possible in needed.items():
        given = config.get(name, possible)
        if given != possible:
            raise ConfigError(f"{name} is {given!r}, but only models with {possible!r} can be converted.")


def same_of(config: Mapping[str, Any], names: str) -> Any:
    """Return the value of a field with several names, separated by `/`."""
    values = {name: config[name] for name in names.split("/") if config.get(name) is not None}
    if len(set(values.values())) > 1:
        given = " and ".join(f"{name} {value!r}" for name, value in values.items())
        raise ConfigError(f"The config has {given}, which are names for the same number: leave the wrong one out.")
    return next(iter(values.values()))
