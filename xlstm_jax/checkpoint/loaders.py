"""The states (positions) of data loaders as JSON, one for each process."""

import base64
import json
import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

LOGGER = logging.getLogger(__name__)

_BYTES = "__bytes__"
_ARRAY = "__array__"


def gather_states(loaders: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Gather the states of all loaders from all processes.

    Args:
        loaders: The loaders of this process by name. All processes have to call this with the same names.

    Returns:
        The states of each loader as JSON values, in the order of the processes. Loaders without `get_state` are left
        out.
    """
    own = {name: _encode(loader.get_state(), name) for name, loader in loaders.items() if hasattr(loader, "get_state")}
    everyone = [own] if jax.process_count() == 1 else [json.loads(text) for text in _allgather(json.dumps(own))]
    return {name: [states[name] for states in everyone] for name in own}


def own_states(stored: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Select the states of this process from the result of `gather_states`.

    If the number of processes has changed, a loader can resume only if its state was the same in all processes.
    Otherwise a warning is logged, and the loader is left out.
    """
    own = {}
    for name, states in stored.items():
        if len(states) == jax.process_count():
            own[name] = _decode(states[jax.process_index()])
        elif all(state == states[0] for state in states):
            own[name] = _decode(states[0])
        else:
            LOGGER.warning(
                "The data loader %r starts anew: its %d processes stood in different places, and now there are %d. "
                "Resume with %d processes to go on with the next batch.",
                name,
                len(states),
                jax.process_count(),
                len(states),
            )
    return own


def _allgather(text: str) -> list[str]:
    """All-gather a text of any length over all processes."""
    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(data.size))
    padded = np.zeros(int(np.max(lengths)), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def _encode(state: Any, name: str) -> Any:
    """Encode a state in JSON types; bytes and arrays are tagged with their type."""
    match state:
        case None | bool() | int() | float() | str():
            return state
        case bytes():
            return _encode_bytes(state)
        case np.generic():
            return state.item()
        case np.ndarray():
            return {_ARRAY: state.tolist(), "dtype": state.dtype.name}
        case list() | tuple():
            return [_encode(element, name) for element in state]
        case Mapping() if all(isinstance(key, str) for key in state):
            return {key: _encode(element, name) for key, element in state.items()}
    raise ValueError(
        f"The state of the data loader {name!r} holds a {type(state).__name__}, {state!r}: `get_state` has to return "
        "numbers, strings, bytes, arrays, lists, and dictionaries with strings as keys."
    )


def _encode_bytes(state: bytes) -> dict[str, str]:
    try:
        return {_BYTES: state.decode(), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {_BYTES: base64.b64encode(state).decode(), "encoding": "base64"}


def _decode(state: Any) -> Any:
    match state:
        case {"__bytes__": str(text), "encoding": encoding}:
            return base64.b64decode(text) if encoding == "base64" else text.encode()
        case {"__array__": values, "dtype": dtype}:
            return np.asarray(values, dtype)
        case dict():
            return {key: _decode(element) for key, element in state.items()}
        case list():
            return [_decode(element) for element in state]
    return state
