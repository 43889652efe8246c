"""The error for invalid settings, and suggestions for misspelt names."""

import difflib
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError, AssertionError):
    """An invalid setting; it is a `ValueError` and an `AssertionError`, so that code that catches either works."""


def nearest(name: Any, options: Iterable[Any]) -> str:
    """Return a question that suggests the option most similar to a name; empty if none is similar."""
    matches = difflib.get_close_matches(str(name), map(str, options), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""
