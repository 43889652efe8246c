"""Masks of position pairs within a chunk."""

import jax
import jax.numpy as jnp

from xlstm_jax.kernels.mosaic_gpu.device import TILE
from xlstm_jax.kernels.mosaic_gpu.pallas import plgpu
from xlstm_jax.kernels.mosaic_gpu.tiles import ACCUMULATOR, broadcast_rows


def mask_scores(
    scores: jax.Array, *, diagonal: bool, anticausal: bool, documents: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    """Set the scores of masked pairs to zero, even if they are infinite.

    Args:
        scores: Scores between `TILE` rows and as many columns.
        diagonal: Whether rows and columns are the same positions; otherwise rows read all columns.
        anticausal: Whether a row reads the columns after it, not those before it.
        documents: The document of each row, and that of each column broadcast over the rows, if there are several.
    """
    mask = None
    if diagonal:
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=ACCUMULATOR)
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=ACCUMULATOR)
        mask = column >= row if anticausal else row >= column
    if documents is not None:
        same = broadcast_rows(documents[0], TILE) == documents[1]
        mask = same if mask is None else mask & same
    return scores if mask is None else jnp.where(mask, scores, 0.0)
