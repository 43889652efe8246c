"""Logits, their sums over the vocabulary and their gradients in plain JAX."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.kernels.soft_cap import soft_cap_logits


def compute_logits(x: jax.Array, kernel: jax.Array, *, dtype: DTypeLike, cap: float | None) -> jax.Array:
    """Multiply in a precision with sums in float32 at least, and squash the products into (-cap, cap)."""
    wide = jnp.promote_types(dtype, jnp.float32)
    logits = jnp.matmul(x.astype(dtype), kernel.astype(dtype), preferred_element_type=wide)
    return soft_cap_logits(logits, cap)


def vocabulary_sums(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, *, dtype: DTypeLike, cap: float | None, tokens_per_chunk: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute what `api.vocabulary_sums` does, for a chunk of tokens at a time."""
    size = kernel.shape[-1]

    def of_chunk(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        features, targets = chunk
        logits = compute_logits(features, kernel, dtype=dtype, cap=cap)
        largest = jnp.max(logits, axis=-1)
        target_logits = jnp.take_along_axis(logits, jnp.clip(targets, 0, size - 1)[:, None], axis=-1)[:, 0]
        target_logits = jnp.where((targets >= 0) & (targets < size), target_logits, 0.0)
        return largest, jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1), target_logits

    results = lax.map(of_chunk, cut_into_chunks((x, targets), tokens_per_chunk))
    largest, totals, target_logits = (y.reshape(-1)[: targets.size] for y in results)
    return largest, totals, target_logits


def logit_gradients(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    log_totals: jax.Array,
    dlosses: jax.Array,
    *,
    dtype: DTypeLike,
    cap: float | None,
) -> jax.Array:
    """Compute what `api.logit_gradients` does."""
    logits = compute_logits(x, kernel, dtype=dtype, cap=cap)
    is_target = jnp.arange(kernel.shape[-1]) == targets[:, None]
    gradients = (jnp.exp(logits - log_totals[:, None]) - is_target) * dlosses[:, None]
    if cap is not None:
        gradients = gradients * (1.0 - jnp.square(logits / cap))
    return gradients.astype(dtype)


def cut_into_chunks(arrays: tuple[jax.Array, ...], tokens_per_chunk: int) -> tuple[jax.Array, ...]:
    """Cut arrays of tokens into chunks, the last one filled up with zeros."""
    num_tokens = arrays[0].shape[0]
    size = min(tokens_per_chunk, num_tokens)

    def cut(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -num_tokens % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, size, *x.shape[1:])

    return tuple(cut(x) for x in arrays)
