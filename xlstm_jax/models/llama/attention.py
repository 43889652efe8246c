"""Attention with rotary positions and grouped queries, and its state: a cache of keys and values."""

import functools
import logging
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from xlstm_jax.configs import ConfigError
from xlstm_jax.kernels.attention import attention, document_attention
from xlstm_jax.kernels.attention.api import mosaic_problem
from xlstm_jax.kernels.attention.hopper.tiling import tiling_problem
from xlstm_jax.kernels.shared.log_once import log_once

LOGGER = logging.getLogger(__name__)

AttentionBackend = Literal["auto", "xla", "cudnn", "mosaic", "pallas_triton"]
"""Names in configs; `pallas_triton` is only accepted to be refused with advice, as old configs contain it."""
BACKENDS = ("auto", "xla", "cudnn", "mosaic")
HALF_PRECISION = (jnp.bfloat16, jnp.float16)


class KVCache(NamedTuple):
    """The keys and values of the tokens so far, in order; rows may hold different numbers of tokens."""

    keys: Float[Array, "b n h d"]
    """Keys, rotated to their positions; slots from `length` on are empty."""
    values: Float[Array, "b n h d"]
    length: Int[Array, " b"]
    """The number of tokens held."""
    next_position: Int[Array, " b"]
    """The default position of the next token."""
    document_start: Int[Array, " b"]
    """The slot where the document of the last token begins."""


def empty_cache(batch_size: int, max_length: int, num_heads: int, head_dim: int, dtype: DTypeLike) -> KVCache:
    """Return the cache before the first token."""
    shape = (batch_size, max_length, num_heads, head_dim)
    zeros = functools.partial(jnp.zeros, (batch_size,), jnp.int32)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), zeros(), zeros(), zeros())


def precompute_freqs(
    feat_dim: int,
    pos_idx: Int[Array, "*b s"] | None = None,
    max_length: int | None = None,
    theta: float = 10000.0,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "*b s d"], Float[Array, "*b s d"]]:
    """Compute the angles of rotary positions: pair `i` of features is rotated by `position / theta^(2i / feat_dim)`.

    Args:
        feat_dim: The number of features, twice the number of pairs.
        pos_idx: The positions.
        max_length: Without `pos_idx`, positions count from 0 up to this number.
        theta: The base.
        dtype: Precision of the results; the angles are computed in float32 at least.

    Returns:
        The sines and cosines of all angles.
    """
    if pos_idx is None:
        if max_length is None:
            raise ValueError("Rotary positions need pos_idx, or max_length to count up to.")
        pos_idx = jnp.arange(max_length)
    wide = jnp.promote_types(dtype, jnp.float32)
    frequencies = theta ** -(jnp.arange(0, feat_dim, 2, dtype=wide) / feat_dim)
    angles = pos_idx[..., None].astype(wide) * frequencies
    return jnp.sin(angles).astype(dtype), jnp.cos(angles).astype(dtype)


def apply_rotary_emb(
    xq: Float[Array, "b s hq d"],
    xk: Float[Array, "b s hk d"],
    freqs_sin: Float[Array, "*b s p"] | None = None,
    freqs_cos: Float[Array, "*b s p"] | None = None,
    theta: float = 10000.0,
) -> tuple[Float[Array, "b s hq d"], Float[Array, "b s hk d"]]:
    """Rotate queries and keys to their positions. Features 0 and 1 are the first pair, 2 and 3 the second.

    Args:
        xq: Queries.
        xk: Keys.
        freqs_sin: Sines of `precompute_freqs`.
        freqs_cos: Cosines of `precompute_freqs`. Without the two, positions count from 0 along the sequence.
        theta: The base, if positions are counted in this function.

    Returns:
        The rotated queries and keys.
    """
    if freqs_sin is None or freqs_cos is None:
        freqs_sin, freqs_cos = precompute_freqs(xq.shape[-1], max_length=xq.shape[1], theta=theta)
    sin, cos = freqs_sin[..., None, :], freqs_cos[..., None, :]

    def rotate(x: jax.Array) -> jax.Array:
        first, second = x[..., 0::2], x[..., 1::2]
        pairs = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-1)
        return pairs.reshape(x.shape).astype(x.dtype)

    return rotate(xq), rotate(xk)


def segment_mask(segment_ids: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    """Return for each pair of positions whether they are in the same segment; the second axis is for heads."""
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def multihead_attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    segment_ids: Int[Array, "b s"] | None = None,
    causal: bool = True,
    qk_scale: float | None = None,
    backend: AttentionBackend = "xla",
    *,
    contiguous_segments: bool = False,
) -> Float[Array, "b s hq d"]:
    """Attend from each position of a sequence to the others.

    Args:
        q: Queries.
        k: Keys. A head of keys and values serves a group of neighbouring heads of queries, if there are fewer of them.
        v: Values.
        segment_ids: Positions attend only to their own segment.
        causal: Positions attend only to themselves and those before.
        qk_scale: Multiplies the products of queries and keys; `1/sqrt(d)` by default.
        backend: `xla`, which runs on every device, `cudnn`, on NVIDIA GPUs and with bfloat16 or float16, `mosaic`, our
            kernels for Hopper GPUs, which compute contiguous segments and leave the rest to cuDNN, or `auto`, the
            fastest one that can run.
        contiguous_segments: Each run of equal ids is a segment of its own, as in rows of packed documents. Then Hopper
            GPUs need no mask of all pairs of positions.

    Returns:
        The weighted mean of values for each head of queries.
    """
    _check_shapes(q, k, v, segment_ids)
    chosen = resolve_backend(backend, q.dtype, q.shape[-1])
    if segment_ids is not None and contiguous_segments:
        form = "auto" if backend == "auto" and chosen == "cudnn" else chosen
        return document_attention(q, k, v, segment_ids, causal=causal, scale=qk_scale, backend=form)
    mask = None if segment_ids is None else segment_mask(segment_ids)
    if mask is not None and chosen != "xla":
        log_once(LOGGER, "Attention within segments: a mask of all pairs of positions, as contiguous_segments is off.")
    return attention(q, k, v, mask, causal=causal, scale=qk_scale, backend=_for_all_pairs(chosen))


def _check_shapes(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> None:
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}, but must be [batch, positions, heads, head_dim].")
    b, s, num_heads, head_dim = q.shape
    if k.ndim != 4 or (*k.shape[:2], k.shape[3]) != (b, s, head_dim) or num_heads % max(k.shape[2], 1):
        raise ValueError(
            f"k has shape {k.shape}, but q of shape {q.shape} needs ({b}, {s}, heads, {head_dim}), with a number of "
            f"heads that divides {num_heads}."
        )
    expected = {"v": (v, k.shape)} | ({} if segment_ids is None else {"segment_ids": (segment_ids, (b, s))})
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, but q of shape {q.shape} needs {shape}.")


def cached_attention(
    q: Float[Array, "b s hq d"],
    cache: KVCache,
    starts: Int[Array, "b s"] | None = None,
    backend: AttentionBackend = "xla",
) -> Float[Array, "b s hq d"]:
    """Attend from the last tokens of a cache to themselves and to the tokens before them.

    Args:
        q: The queries of the last tokens.
        cache: The cache, including the keys and values of these tokens.
        starts: The first slot that each token attends to; slot 0 by default.
        backend: As for `multihead_attention`.

    Returns:
        The weighted mean of values for each head of queries.
    """
    key_slots = jnp.arange(cache.keys.shape[1])
    slots = cache.length[:, None] - q.shape[1] + jnp.arange(q.shape[1])
    mask = key_slots <= slots[..., None]
    if starts is not None:
        mask = mask & (key_slots >= starts[..., None])
    chosen = _for_all_pairs(resolve_backend(backend, q.dtype, q.shape[-1]))
    return jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=mask[:, None], implementation=chosen)


def append(
    cache: KVCache,
    k: Float[Array, "b s h d"],
    v: Float[Array, "b s h d"],
    positions: Int[Array, "b s"],
    starts: Int[Array, "b s"] | None = None,
) -> KVCache:
    """Append tokens to a cache; tokens that do not fit are dropped.

    Args:
        cache: The cache.
        k: The keys of the tokens.
        v: Their values.
        positions: Their positions.
        starts: The slots where their documents begin.

    Returns:
        The cache with these tokens.
    """
    at = jnp.arange(k.shape[0])[:, None], cache.length[:, None] + jnp.arange(k.shape[1])
    return KVCache(
        keys=cache.keys.at[at].set(k, mode="drop", unique_indices=True, indices_are_sorted=True),
        values=cache.values.at[at].set(v, mode="drop", unique_indices=True, indices_are_sorted=True),
        length=cache.length + k.shape[1],
        next_position=positions[:, -1].astype(jnp.int32) + 1,
        document_start=cache.document_start if starts is None else starts[:, -1],
    )


def check_backend(backend: str, dtype: jnp.dtype, head_dim: int) -> None:
    """Raise if a backend does not exist, or cannot compute heads of a precision and size on any device."""
    if backend == "pallas_triton":
        raise ConfigError(
            "The attention backend 'pallas_triton' is gone, for JAX has deprecated it: use 'cudnn' on NVIDIA GPUs, or "
            "'xla', which runs everywhere."
        )
    if backend not in BACKENDS:
        raise ConfigError(f"There is no attention backend {backend!r}, only {', '.join(BACKENDS)}.")
    if backend == "cudnn" and dtype not in HALF_PRECISION:
        raise ConfigError(
            f"The attention backend 'cudnn' needs bfloat16 or float16, not {dtype}: change it, or use 'xla'."
        )
    if backend == "mosaic":
        problem = tiling_problem(head_dim) if dtype == jnp.bfloat16 else f"it needs bfloat16, not {dtype}"
        if problem:
            raise ConfigError(f"The attention backend 'mosaic' cannot be used, as {problem}: choose 'auto'.")
    if backend == "cudnn" and head_dim % 8:
        raise ConfigError(f"The attention backend 'cudnn' needs a head_dim that is a multiple of 8, not {head_dim}.")


def choose_backend(dtype: jnp.dtype, head_dim: int) -> tuple[Literal["xla", "cudnn"], str]:
    """Return the backend that `auto` picks on this device, and why."""
    platform = jax.default_backend()
    if platform == "gpu" and dtype in HALF_PRECISION and head_dim % 8 == 0 and head_dim <= 128:
        return "cudnn", "cuDNN, for this is a GPU and heads are in half precision"
    needs = "a GPU, half precision and heads of 8, 16, ... 128 features"
    return "xla", f"XLA, for cuDNN needs {needs}, not {platform}, {dtype} and {head_dim}"


def resolve_backend(backend: AttentionBackend, dtype: jnp.dtype, head_dim: int) -> Literal["xla", "cudnn", "mosaic"]:
    """Return the backend that computes heads of a precision and size on this device, and log what `auto` picks.

    Raises:
        ValueError: If the backend cannot, with the reason.
    """
    check_backend(backend, dtype, head_dim)
    if backend == "auto":
        chosen, reason = choose_backend(dtype, head_dim)
        log_once(LOGGER, f"Attention: {reason}.")
        return chosen
    if backend == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(
            f"The attention backend 'cudnn' needs a GPU, but JAX runs on {jax.default_backend()}: use 'xla'."
        )
    if backend == "mosaic" and (problem := mosaic_problem(dtype, head_dim)):
        raise ValueError(f"The attention backend 'mosaic' cannot run here: {problem}. Choose 'auto'.")
    return backend if backend in ("cudnn", "mosaic") else "xla"


def _for_all_pairs(backend: Literal["xla", "cudnn", "mosaic"]) -> Literal["xla", "cudnn"]:
    """Return the backend for attention outside packed documents, which the kernels for Hopper GPUs leave to cuDNN."""
    return "cudnn" if backend == "mosaic" else backend
