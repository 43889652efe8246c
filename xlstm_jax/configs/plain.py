"""Conversion of configs to plain, JSON-serialisable values."""

import dataclasses
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from xlstm_jax.import_utils import class_to_name, dotted_path, resolve_import


def to_plain(value: Any) -> Any:
    """Convert a value to plain values, as `ConfigDict.to_dict` does."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type):
        return class_to_name(value)
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return tuple(to_plain(element) for element in value)
    if isinstance(value, Mapping):
        return {key: to_plain(element) for key, element in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, PurePath):
        return value.as_posix()
    return dotted_path(value) if _has_path(value) else str(value)


def _has_path(value: Any) -> bool:
    try:
        return callable(value) and resolve_import(dotted_path(value)) is value
    except (AttributeError, ImportError):
        return False


def flat_config(plain: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Flatten nested settings to one level of dotted names.

    Args:
        plain: Nested settings, as `ConfigDict.to_dict` returns them.

    Returns:
        The values by dotted names, such as `trainer.callbacks.0.every_n_steps`. Sequences of values and `None` become
        strings.
    """
    flat = {}
    for name, value in plain.items():
        if isinstance(value, list | tuple) and any(isinstance(element, Mapping) for element in value):
            value = {str(index): element for index, element in enumerate(value)}
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": leaf for inner, leaf in flat_config(value).items()}
        else:
            flat[str(name)] = value if isinstance(value, bool | int | float | str) else str(value)
    return flat
