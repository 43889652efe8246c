"""Agreement between the processes of a run: the first one decides and broadcasts."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def from_first_process(decide: Callable[[], Any]) -> Any:
    """Call a function in the first process and return its result, which has to be JSON-serialisable, in all."""
    if jax.process_count() == 1:
        return decide()
    text = json.dumps(decide()).encode() if jax.process_index() == 0 else b""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    padded = np.zeros(length, np.uint8)
    padded[: len(text)] = list(text)
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(padded)).decode())
