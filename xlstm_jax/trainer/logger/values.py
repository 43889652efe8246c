"""Configs and metrics in the forms that tools can write: plain, flat, or numbers alone."""

import importlib
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from xlstm_jax.configs import ConfigDict


def plain_config(config: ConfigDict | dict[str, ConfigDict]) -> dict[str, Any]:
    """Write a config, or configs by name, with nothing but dictionaries, tuples, numbers, strings and `None`."""
    if isinstance(config, ConfigDict):
        return config.to_dict()
    return {name: part.to_dict() for name, part in config.items()}


def only_numbers(metrics: Mapping[str, Any]) -> dict[str, bool | int | float]:
    """Leave out metrics that no curve can show: arrays, tuples, text."""
    return {name: value for name, value in metrics.items() if isinstance(value, bool | int | float)}


def json_value(value: Any, *, non_finite: Callable[[float], str | None]) -> Any:
    """Turn any metric or setting into what JSON can hold.

    Args:
        value: Arrays and tuples become lists; what JSON does not know becomes its `str`.
        non_finite: Returns what stands for `nan`, `inf` and `-inf`, which JSON does not have.

    Returns:
        The value for `json.dumps`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else non_finite(value)
    if hasattr(value, "tolist"):
        return json_value(value.tolist(), non_finite=non_finite)
    if isinstance(value, list | tuple):
        return [json_value(element, non_finite=non_finite) for element in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(element, non_finite=non_finite) for key, element in value.items()}
    return str(value)


def import_extra(module: str, *, extra: str) -> ModuleType:
    """Import a package that only one of our extras installs.

    Args:
        module: The name of the package's module.
        extra: The extra that installs it.

    Returns:
        The module.

    Raises:
        ImportError: If it is not installed; the message says how to.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # The package is there; something that it imports is not.
            raise
        raise ImportError(f"{module} is not installed: `pip install 'xlstm_jax[{extra}]'` brings it.") from error
