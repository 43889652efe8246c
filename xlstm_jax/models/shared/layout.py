"""Two layouts of the parameters of a stack: scanned (stacked), and canonical with one entry for each block.

Checkpoints and conversion use the canonical one, `block_stack.block_<i>`; `BlockStack` describes the scanned one.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.shared.stack import is_scanned, period


def to_canonical(params: dict[str, Any], kinds: Sequence[str], scan: bool) -> dict[str, Any]:
    """Unstack the parameters of scanned blocks.

    Args:
        params: The parameters of a model, without boxes.
        kinds: The kinds of its blocks.
        scan: Whether the model scans over blocks.

    Returns:
        The parameters in the canonical layout.
    """
    if not is_scanned(kinds, scan):
        return params
    pattern = period(kinds)
    stacked = params["block_stack"]["block"]
    places = [stacked] if len(pattern) == 1 else [stacked[str(place)] for place in range(len(pattern))]
    blocks = {}
    for index in range(len(kinds)):
        repetition, place = divmod(index, len(pattern))
        blocks[f"block_{index}"] = jax.tree.map(lambda x, repetition=repetition: x[repetition], places[place])
    return {**params, "block_stack": blocks}


def from_canonical(params: dict[str, Any], kinds: Sequence[str], scan: bool) -> dict[str, Any]:
    """Stack the parameters of scanned blocks; the inverse of `to_canonical`."""
    if not is_scanned(kinds, scan):
        return params
    pattern = period(kinds)
    blocks = [params["block_stack"][f"block_{index}"] for index in range(len(kinds))]
    places = [_stack(blocks[place :: len(pattern)]) for place in range(len(pattern))]
    stacked = places[0] if len(pattern) == 1 else {str(place): tree for place, tree in enumerate(places)}
    return {**params, "block_stack": {"block": stacked}}


def _stack(trees: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
