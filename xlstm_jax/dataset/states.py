"""Checks of iterator states."""

from collections.abc import Mapping
from typing import Any


def check_keys(state: Any, *keys: str) -> None:
    """Raise unless a state is a dictionary with these keys, as returned by `get_state`."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"The state is a {type(state).__name__}, but must be a dictionary: pass what get_state returned."
        )
    missing = [key for key in keys if key not in state]
    if missing:
        raise ValueError(
            f"The state has {_listed(state)}, but needs {_listed(missing)} too: pass what get_state of such an "
            "iterator returned."
        )


def _listed(keys: Any) -> str:
    return ", ".join(map(repr, keys)) or "no entries"
