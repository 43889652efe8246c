"""The layout of a model that is fastest for decoding one token at a time."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.language_model import LanguageModel
from xlstm_jax.models.shared.layout import to_canonical

Model = TypeVar("Model", bound=LanguageModel)


def for_decoding(model: Model, params: Mapping[str, Any]) -> tuple[Model, dict[str, Any]]:
    """Unroll the blocks of a model, and convert their parameters to the decoding layout of each kind of block.

    A scan over blocks copies the weights and the state of each block out of their stacks, and the state back, for every
    token. Unrolled, the weights of a block are read in place, and its state is updated in place. Float8 is turned off,
    as weights would be quantised for every token. Call this function once, before the loop over tokens; while it runs,
    the parameters are in memory twice.

    Args:
        model: The model.
        params: Its parameters, without boxes.

    Returns:
        A model that computes the same function, and its parameters.
    """
    kinds = model.config.kinds
    canonical = to_canonical(dict(params), kinds, model.config.scan_blocks)
    blocks = {
        f"block_{index}": block_kind(kind).lay_out_for_decoding(canonical["block_stack"][f"block_{index}"])
        for index, kind in enumerate(kinds)
    }
    config = dataclasses.replace(model.config, scan_blocks=False, float8=False)
    return model.clone(config=config), {**canonical, "block_stack": blocks}
