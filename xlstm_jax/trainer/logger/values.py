"""Conversion of configs and metrics to the formats that tools support: plain, flat, or numbers only."""

import importlib
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from xlstm_jax.configs import ConfigDict


def plain_config(config: ConfigDict | dict[str, ConfigDict]) -> dict[str, Any]:
    """Convert a config, or configs by name, to dictionaries, tuples, numbers, strings and `None`."""
    if isinstance(config, ConfigDict):
        return config.to_dict()
    return {name: part.to_dict() for name, part in config.items()}


def only_numbers(metrics: Mapping[str, Any]) -> dict[str, bool | int | float]:
    """Return the scalar metrics, without arrays, tuples and text."""
    return {name: value for name, value in metrics.items() if isinstance(value, bool | int | float)}


def json_value(value: Any, *, non_finite: Callable[[float], str | None]) -> Any:
    """Convert any metric or setting to a value that JSON supports.

    Args:
        value: The value. Arrays and tuples become lists; other types that JSON does not support become their `str`.
        non_finite: Returns the replacement of `nan`, `inf` and `-inf`, which JSON does not support.

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
    """Import a package that one of our optional extras installs.

    Args:
        module: The name of the package's module.
        extra: The extra that installs it.

    Returns:
        The module.

    Raises:
        ImportError: If the package is not installed; the message has the command to install it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # The package is installed, but one of its imports is missing.
            raise
        raise ImportError(f"{module} is not installed: `pip install 'xlstm_jax[{extra}]'` brings it.") from error
