"""Checks that the configs of optimizers and schedules share."""

import logging
import math
import re
from collections.abc import Collection, Iterable

from xlstm_jax.configs import ConfigDict, ConfigError, describe_ignored, nearest

LOGGER = logging.getLogger(__name__)


def check_name(name: str, *, kind: str, known: Collection[str]) -> None:
    """Raise if a name is unknown, and suggest the most similar known one."""
    if name in known:
        return
    raise ConfigError(f"Unknown {kind} {name!r}.{nearest(name, known)} Known names: {', '.join(known)}.")


def check_not_negative(**values: float | int | None) -> None:
    """Raise if a value is not a number, or is negative, infinite or NaN; `None` is allowed."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and 0 <= value < math.inf):
            raise ConfigError(f"{name} is {value!r}, but must be a finite number of at least 0.")


def check_positive(**values: float | int | None) -> None:
    """Raise if a value is not a positive finite number; `None` is allowed."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise ConfigError(f"{name} is {value!r}, but must be positive and finite. Use None to switch it off.")


def check_decay_rates(**values: float | int | None) -> None:
    """Raise if the decay rate of an average is outside [0, 1); `None` is allowed."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and 0 <= value < 1):
            raise ConfigError(f"{name} is {value!r}, but the decay rate of an average must be in [0, 1).")


def check_whole(**values: float | int | None) -> None:
    """Raise if a number is not whole; `None` is allowed."""
    for name, value in values.items():
        if value is not None and value != int(value):
            raise ConfigError(f"{name} is {value!r}, but must be a whole number.")


def _is_number(value: object) -> bool:
    """Return whether a value is a number or an array with one number."""
    return not isinstance(value, str | bool) and hasattr(value, "__float__")


def warn_of_ignored(config: ConfigDict) -> None:
    """Warn about fields that are set but have no effect; in the settings of a run they are an error."""
    for sentence in describe_ignored(config, config.ignored_fields()).values():
        LOGGER.warning("%s: %s", type(config).__name__, sentence)


def check_patterns(**values: Iterable[str] | None) -> None:
    """Raise unless each value is a list of valid regular expressions; `None` is allowed."""
    for name, patterns in values.items():
        if isinstance(patterns, str):
            raise ConfigError(f"{name} is {patterns!r}, but must be a list. Write [{patterns!r}].")
        for pattern in patterns or ():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                raise ConfigError(f"{name} holds {pattern!r}, which is no regular expression: {error}.") from error
