"""Attention for callers: the backends of JAX, and documents without a mask of all pairs of positions."""

import logging
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from xlstm_jax.kernels.attention import packed
from xlstm_jax.kernels.log import say_once

LOGGER = logging.getLogger(__name__)

Backend = Literal["xla", "cudnn"]
LARGEST_HEAD_DIM = 128


def attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b n hk d"],
    v: Float[Array, "b n hk d"],
    mask: Bool[Array, "b 1 s n"] | None = None,
    *,
    causal: bool,
    scale: float | None,
    backend: Backend,
) -> Float[Array, "b s hq d"]:
    """Compute attention of any length, with an optional mask that is True where a query sees a key.

    cuDNN takes the mask as a bias: an array of all pairs of positions in the precision of the inputs.
    """
    length = q.shape[1]
    if backend == "cudnn" and length % 2 and k.shape[1] == length:
        # With a bias, cuDNN's gradients need an even length. No other position sees the one that is added.
        if mask is None and not causal:
            mask = jnp.ones((q.shape[0], 1, length, length), bool)
        if mask is not None:
            mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 1), (0, 1))).at[..., -1, -1].set(True)
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, scale=scale, implementation=backend)
    return out[:, :length]


def document_attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    segment_ids: Int[Array, "b s"],
    *,
    causal: bool,
    scale: float | None,
    backend: Backend,
) -> Float[Array, "b s hq d"]:
    """Compute attention within documents: each run of equal ids in a row is one.

    With cuDNN on Hopper GPUs and later ones, only pairs of positions within a document are computed, and memory grows
    with the length of a row, not with its square. Where that is not possible, a mask of all pairs is built.
    """
    if backend == "cudnn":
        problem = packed_problem(q, k)
        form = "cuDNN's packed layout" if problem is None else f"a mask of all pairs of positions, as {problem}"
        say_once(LOGGER, f"Attention within documents: {form}.")
        if problem is None:
            scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
            documents, slots = packed.number_documents(segment_ids), packed.choose_slots(*q.shape)
            return packed.packed_attention(q, k, v, documents, causal, scale, slots)
    documents = packed.number_documents(segment_ids)
    mask = (documents[:, :, None] == documents[:, None, :])[:, None]
    return attention(q, k, v, mask, causal=causal, scale=scale, backend=backend)


def packed_problem(q: Float[Array, "b s hq d"], k: Float[Array, "b s hk d"]) -> str | None:
    """Return why cuDNN's packed layout cannot be used here, or `None` if it can."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability is None or float(capability) < packed.NEEDED_CAPABILITY:
        return f"cuDNN's packed layout needs a Hopper GPU or a later one, not {jax.devices()[0].device_kind}"
    if q.shape[-1] > LARGEST_HEAD_DIM or q.shape[-1] % 8:
        return f"cuDNN's packed layout needs heads of 8, 16, ... {LARGEST_HEAD_DIM} features, not {q.shape[-1]}"
    if max(q.size, k.size) > packed.LARGEST_OFFSET:
        return f"cuDNN's packed layout needs 32-bit offsets, and there are {max(q.size, k.size)} numbers"
    if packed.choose_slots(*q.shape) < 2:
        return f"cuDNN's packed layout would need too much memory for {q.shape[0]} rows of {q.shape[1]} positions"
    return None
