"""What is wrong with a setting, and what was probably meant."""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError, AssertionError):
    """A setting that cannot be used; code that catches `ValueError` or `AssertionError` catches it."""


def nearest(name: Any, options: Iterable[Any]) -> str:
    """Return a question that suggests the option nearest to a name; empty if none is near."""
    matches = difflib.get_close_matches(str(name), map(str, options), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
