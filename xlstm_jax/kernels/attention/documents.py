"""Bounds of documents within rows. A document is a run of equal segment ids."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from xlstm_jax.kernels.mlstm.scans import scan


def document_bounds(segment_ids: Int[Array, "b s"]) -> tuple[Int[Array, "b s"], Int[Array, "b s"]]:
    """Return the start and the (exclusive) end of the document of each position."""
    length = segment_ids.shape[1]
    begins = _first_of_documents(segment_ids)
    ends = jnp.concatenate([begins[:, 1:], jnp.ones_like(begins[:, :1])], axis=1)
    positions = jnp.arange(length, dtype=jnp.float32)
    starts = _scan(jnp.where(begins, positions, -1.0), "max")
    # The nearest end at or after each position.
    behind = -_scan(jnp.where(ends, -1.0 - positions, -1.0 - length), "max", reverse=True)
    return starts.astype(jnp.int32), behind.astype(jnp.int32)


def number_documents(segment_ids: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Return the index of the document of each position, counted from 0 over all rows."""
    borders = _first_of_documents(segment_ids).astype(jnp.float32)
    in_row = _scan(borders, "sum")
    before = jnp.cumsum(in_row[:, -1]) - in_row[:, -1]
    return (before[:, None] + in_row).astype(jnp.int32) - 1


def running_max(x: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Return the running maximum, for numbers of magnitude up to 2^24."""
    return _scan(x.astype(jnp.float32), "max").astype(x.dtype)


def _first_of_documents(segment_ids: Int[Array, "b s"]) -> Bool[Array, "b s"]:
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.concatenate([jnp.ones_like(segment_ids[:, :1], bool), changes], axis=1)


def _scan(x: Float[Array, "b s"], operation: Literal["sum", "max"], *, reverse: bool = False) -> Float[Array, "b s"]:
    """Run a scan in few GPU kernels, in float32, which is exact for positions up to 2^24."""
    return scan(x, operation, reverse=reverse, unroll=jax.default_backend() == "gpu")
