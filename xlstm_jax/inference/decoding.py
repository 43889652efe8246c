"""The same model in the layout that is fastest for one token at a time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from xlstm_jax.models.shared.layout import to_canonical
from xlstm_jax.models.shared.projections import lay_side_by_side
from xlstm_jax.models.xlstm import XLSTM


def for_decoding(model: XLSTM, params: Mapping[str, Any]) -> tuple[XLSTM, dict[str, Any]]:
    """Write the blocks of a model out one by one, and lay kernels of `mlstm` blocks that share an input side by side.

    A scan over blocks copies the weights and the state of each block out of their stacks, and the state back, for every
    token: with the weights of a block in arrays of their own they are read where they lie, and a state that only one
    block has is updated in place. Nothing is rounded to float8, as weights would be for every token. Call it once,
    before the loop over tokens; while it runs, the parameters are in memory twice.

    Args:
        model: The model.
        params: Its parameters, without boxes.

    Returns:
        A model that computes the same, and its parameters.
    """
    kinds = model.config.kinds
    canonical = to_canonical(dict(params), kinds, model.config.scan_blocks)
    blocks = dict(canonical["block_stack"])
    # Only layers of these blocks look for each other.
    names = [f"block_{index}" for index, kind in enumerate(kinds) if kind == "mlstm"]
    blocks |= {name: lay_side_by_side(blocks[name]) for name in names}
    config = dataclasses.replace(model.config, scan_blocks=False, float8=False)
    return XLSTM(config), {**canonical, "block_stack": blocks}
