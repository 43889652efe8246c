"""Shared validation of configs, and metadata that they declare for their fields."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from xlstm_jax.configs.errors import ConfigError

MAY_CHANGE = types.MappingProxyType({"may_change_on_resume": True})
"""Metadata of a field that a resumed run may change, because it does not affect the meaning of checkpoints."""
FIXED = types.MappingProxyType({"may_change_on_resume": False})
"""Metadata of a field that a resumed run may not change."""


def fixed_settings(config: Any, name: str, *, may_change: bool) -> Iterator[str]:
    """Yield the dotted names of the settings that a resumed run may not change.

    Args:
        config: A dataclass.
        name: The key of the config in the settings.
        may_change: Whether fields without a declaration (`MAY_CHANGE` or `FIXED`) may change. A declaration is
            inherited by all fields of a nested config that have none themselves.
    """
    for field in dataclasses.fields(config):
        allowed = field.metadata.get("may_change_on_resume", may_change)
        value, place = getattr(config, field.name), f"{name}.{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from fixed_settings(value, place, may_change=allowed)
        elif not allowed:
            yield place


def check_seed(name: str, seed: int) -> None:
    """Raise unless a seed fits into 32 bits; JAX would use only the lower half of a larger one."""
    if not -(2**31) <= seed < 2**32:
        raise ConfigError(f"{name} is {seed}, but must be from -2147483648 to 4294967295.")


def describe_ignored(config: Any, reasons: Mapping[str, str]) -> dict[str, str]:
    """Describe the fields that differ from their defaults although they have no effect.

    Args:
        config: A dataclass.
        reasons: The reasons why fields have no effect, by name; each completes a sentence after "has no effect".

    Returns:
        A sentence for each such field, by name.
    """
    defaults = {field.name: _default_of(field) for field in dataclasses.fields(config)}
    changed = {name: getattr(config, name) for name in reasons if getattr(config, name) != defaults[name]}
    return {
        name: f"{name} is {value!r}, but has no effect {reasons[name]}: leave it out, or at {defaults[name]!r}."
        for name, value in changed.items()
    }


def refuse_ignored(config: Any, reasons: Mapping[str, str]) -> None:
    """Raise a `ConfigError` for the first field that `describe_ignored` describes."""
    for sentence in describe_ignored(config, reasons).values():
        raise ConfigError(sentence)


def _default_of(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def check_numbers(config: Any, config_class: type | None = None) -> None:
    """Raise a `ConfigError` unless every field annotated as a number holds a finite number.

    Args:
        config: The config, a dataclass.
        config_class: Check only the fields of this base class, not those that users' subclasses add. By default, all
            fields are checked.
    """
    for field in dataclasses.fields(config_class or config):
        kinds = set(typing.get_args(field.type) or (field.type,))
        value = getattr(config, field.name)
        if not kinds & {int, float} or not kinds <= {int, float, types.NoneType}:
            continue
        if value is None and types.NoneType in kinds:
            continue
        wanted, noun = (numbers.Real, "number") if float in kinds else (numbers.Integral, "whole number")
        if not isinstance(value, wanted) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{field.name} is {value!r}, but must be a {'finite ' * (float in kinds)}{noun}.")


def check_least(config: Any, least: int | float, *names: str) -> None:
    """Raise a `ConfigError` unless the named fields are at least `least` or `None`."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}, but must be at least {least}.")
