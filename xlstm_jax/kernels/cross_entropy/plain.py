"""Logits, their sums over the vocabulary and their gradients in plain JAX."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.kernels.cross_entropy.tiling import COLUMNS
from xlstm_jax.kernels.shared.soft_cap import soft_cap_logits

Tree = TypeVar("Tree")

FARTHEST = -6e4
"""The lower bound of distances that are saved in float16; the exponential of any lower one is zero."""


class VocabularySums(NamedTuple):
    """The sums over one shard of the vocabulary that the loss of each token needs; indices are within the shard."""

    largest: jax.Array
    """The largest logit."""
    totals: jax.Array
    """The sum of `exp(logit - largest)`."""
    target_logits: jax.Array
    """The logit of the target; 0 if the target is in another shard."""
    best: jax.Array
    """The index of the largest logit, the first one if several are equal."""


class KeptLogits(NamedTuple):
    """Logits that a forward pass saves for the backward pass.

    They are stored as distances from a reference that none of the neighbouring logits exceeds. The larger a logit, the
    smaller is its distance, so float16 rounds the exponentials that matter by no more than bfloat16 would.
    """

    distances: jax.Array
    """`[tokens, vocabulary]`; none is positive."""
    references: jax.Array
    """`[tokens, tiles]`, one for each `COLUMNS` logits."""


def compute_logits(x: jax.Array, kernel: jax.Array, *, dtype: DTypeLike, cap: float | None) -> jax.Array:
    """Compute logits, with a matmul that accumulates in float32 at least, and squash them into (-cap, cap)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    logits = jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=wide)
    return soft_cap_logits(logits, cap)


def vocabulary_sums(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    *,
    dtype: DTypeLike,
    cap: float | None,
    tokens_per_chunk: int,
    keep_logits: bool,
) -> tuple[VocabularySums, KeptLogits | None]:
    """Compute `api.vocabulary_sums`, a chunk of tokens at a time."""
    size = kernel.shape[-1]

    def of_chunk(chunk: tuple[jax.Array, ...]) -> Any:
        features, targets = chunk
        logits = compute_logits(features, kernel, dtype=dtype, cap=cap)
        largest = jnp.max(logits, axis=-1)
        columns = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        best = jnp.min(jnp.where(logits >= largest[:, None], columns, size), axis=-1)
        target_logits = jnp.take_along_axis(logits, jnp.clip(targets, 0, size - 1)[:, None], axis=-1)[:, 0]
        target_logits = jnp.where((targets >= 0) & (targets < size), target_logits, 0.0)
        distances = logits - largest[:, None]
        kept = jnp.maximum(distances, FARTHEST).astype(kept_dtype(dtype)) if keep_logits else None
        return VocabularySums(largest, jnp.sum(jnp.exp(distances), axis=-1), target_logits, best), kept

    results, kept = lax.map(of_chunk, cut_into_chunks((x, targets), tokens_per_chunk))
    sums = VocabularySums(*(y.reshape(-1)[: targets.size] for y in results))
    if kept is not None:
        references = jnp.broadcast_to(sums.largest[:, None], (targets.size, -(-size // COLUMNS)))
        kept = KeptLogits(kept.reshape(-1, size)[: targets.size], references)
    return sums, kept


def kept_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return the precision in which logits are saved, for matmuls in the given precision."""
    return jnp.dtype("float16") if jnp.dtype(dtype).itemsize == 2 else jnp.dtype(dtype)


def restored(kept: KeptLogits) -> jax.Array:
    """Return the saved logits, up to rounding."""
    references = jnp.repeat(kept.references, COLUMNS, axis=-1)[:, : kept.distances.shape[-1]]
    return kept.distances.astype(references.dtype) + references


def logit_gradients(
    logits: jax.Array, targets: jax.Array, log_totals: jax.Array, dlosses: jax.Array, *, cap: float | None
) -> jax.Array:
    """Compute the gradients of logits before the cap, in the precision of logits; arguments as in `api`."""
    is_target = jnp.arange(logits.shape[-1]) == targets[:, None]
    gradients = (jnp.exp(logits - log_totals[:, None]) - is_target) * dlosses[:, None]
    return gradients if cap is None else gradients * (1.0 - jnp.square(logits / cap))


def cut_into_chunks(tree: Tree, tokens_per_chunk: int) -> Tree:
    """Split arrays of tokens into chunks; the last chunk is zero-padded."""
    num_tokens = jax.tree.leaves(tree)[0].shape[0]
    size = min(tokens_per_chunk, num_tokens)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -num_tokens % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, size, *x.shape[1:])

    return jax.tree.map(cut, tree)
