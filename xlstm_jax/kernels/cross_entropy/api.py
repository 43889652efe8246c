"""Cross-entropy from features: the losses of tokens and their gradients, with or without saved logits.

The vocabulary may be sharded over devices, so there are two functions, between which callers combine the sums of all
devices. Plain JAX computes the logits of a chunk of tokens at a time; on Hopper GPUs, the forward pass stores no logits
in global memory. If logits are saved for the backward pass, it needs one matmul less.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from xlstm_jax.kernels.cross_entropy import plain
from xlstm_jax.kernels.cross_entropy.plain import KeptLogits, VocabularySums
from xlstm_jax.kernels.cross_entropy.tiling import tiling_problem
from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
from xlstm_jax.kernels.shared.log_once import log_once

LOGGER = logging.getLogger(__name__)


def vocabulary_sums(
    x: Float[Array, "t d"],
    kernel: Float[Array, "d v"],
    targets: Int[Array, " t"],
    *,
    dtype: DTypeLike,
    cap: float | None,
    tokens_per_chunk: int,
    keep_logits: bool = False,
) -> tuple[VocabularySums, KeptLogits | None]:
    """Compute the sums over the vocabulary that the losses need, and the index of the largest logit.

    The kernels for Hopper GPUs do not compute the index of the largest logit: there, `best` is the target if no logit
    is larger, and otherwise the size of this shard of the vocabulary.

    Args:
        x: The features of tokens.
        kernel: The projection to this device's shard of the vocabulary.
        targets: The index of the target of each token in that shard; out of range if the target is in another shard.
        dtype: Precision of the matmuls, which accumulate in float32 at least.
        cap: Logits are squashed into (-cap, cap); `None` for no cap.
        tokens_per_chunk: The number of tokens in a chunk in plain JAX.
        keep_logits: Whether to save all logits for `gradients`.

    Returns:
        The sums of each token, and the saved logits.
    """
    options = {"cap": cap, "keep_logits": keep_logits}
    if _is_fused(x.shape[0], kernel, dtype):
        from xlstm_jax.kernels.cross_entropy import hopper

        size = kernel.shape[1]
        # The kernels pad the vocabulary: an out-of-range target would have the logit of the padding.
        own_targets = jnp.where((targets >= 0) & (targets < size), targets, -1)
        sums, kept = hopper.vocabulary_sums(x.astype(dtype), kernel.astype(dtype), own_targets, **options)
        largest, _, target_logits = sums
        is_best = (own_targets >= 0) & (target_logits >= largest)
        return VocabularySums(*sums, best=jnp.where(is_best, own_targets, size)), kept
    return plain.vocabulary_sums(x, kernel, targets, dtype=dtype, tokens_per_chunk=tokens_per_chunk, **options)


def gradients(
    x: Float[Array, "t d"],
    kernel: Float[Array, "d v"],
    targets: Int[Array, " t"],
    log_totals: Float[Array, " t"],
    dlosses: Float[Array, " t"],
    kept: KeptLogits | None = None,
    *,
    dtype: DTypeLike,
    cap: float | None,
    tokens_per_chunk: int,
) -> tuple[Float[Array, "t d"], Float[Array, "d v"]]:
    """Compute the gradients of features and kernel, a chunk of tokens at a time.

    Automatic differentiation would compute the matmuls with the gradients of logits in float32, at a fraction of the
    speed of bfloat16, and scatter the gradients of target logits. The gradient of the kernel is accumulated in the
    precision of the kernel.

    Args:
        x: As for `vocabulary_sums`, like `kernel`, `targets`, `dtype` and `cap`.
        log_totals: The logarithm of the sum of the exponentials of all logits of each token.
        dlosses: The gradient of each token's loss.
        kept: The saved logits; `None` recomputes them.
        tokens_per_chunk: The number of tokens in a chunk.
    """
    narrow = kernel.astype(dtype)
    is_fused = kept is None and _is_fused(min(tokens_per_chunk, x.shape[0]), kernel, dtype)

    def logit_gradients(features: jax.Array, kept: KeptLogits | None, *rest: jax.Array) -> jax.Array:
        if is_fused:
            from xlstm_jax.kernels.cross_entropy import hopper

            return hopper.logit_gradients(features, narrow, *rest, cap=cap)
        logits = plain.compute_logits(features, narrow, dtype=dtype, cap=cap) if kept is None else plain.restored(kept)
        return plain.logit_gradients(logits, *rest, cap=cap).astype(dtype)

    def of_chunk(dkernel: jax.Array, chunk: Any) -> tuple[jax.Array, jax.Array]:
        features, *rest = chunk
        features = features.astype(dtype)
        dlogits = logit_gradients(features, *rest)
        dfeatures = jnp.matmul(dlogits, narrow.T, preferred_element_type=x.dtype)
        return dkernel + jnp.matmul(features.T, dlogits, preferred_element_type=kernel.dtype), dfeatures

    chunks = plain.cut_into_chunks((x, kept, targets, log_totals, dlosses), tokens_per_chunk)
    dkernel, dx = jax.lax.scan(of_chunk, jnp.zeros_like(kernel), chunks)
    return dx.reshape(-1, x.shape[-1])[: x.shape[0]], dkernel


def fused_problem(num_tokens: int, num_features: int, vocab_size: int, dtype: DTypeLike) -> str | None:
    """Return why the kernels for Hopper GPUs are not used, or `None` if they are."""
    if problem := hopper_unavailable_reason():
        return problem
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernels for Hopper GPUs multiply in bfloat16, not in {jnp.dtype(dtype).name}"
    return tiling_problem(num_tokens, num_features, vocab_size)


def _is_fused(num_tokens: int, kernel: jax.Array, dtype: DTypeLike) -> bool:
    problem = fused_problem(num_tokens, kernel.shape[0], kernel.shape[1], dtype)
    log_once(LOGGER, "Loss: " + ("the kernels for Hopper GPUs." if problem is None else f"plain JAX, as {problem}."))
    return problem is None
