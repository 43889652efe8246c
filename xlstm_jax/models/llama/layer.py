"""The attention layer: projections, rotary positions and attention, with a cache of keys and values as its state."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import ColumnDense, RowDense, apply_to_same
from xlstm_jax.kernels.attention.api import LARGEST_HEAD_DIM, mosaic_problem
from xlstm_jax.kernels.attention.documents import running_max
from xlstm_jax.kernels.attention.hopper.tiling import tiling_problem
from xlstm_jax.kernels.attention.packed import choose_slots
from xlstm_jax.models.blocks import cost
from xlstm_jax.models.blocks.activations import BlockActivations, Placement
from xlstm_jax.models.blocks.kind import Kernel, StateCapacity
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.models.llama.attention import (
    BACKENDS,
    AttentionBackend,
    KVCache,
    append,
    apply_rotary_emb,
    cached_attention,
    check_backend,
    choose_backend,
    empty_cache,
    multihead_attention,
    precompute_freqs,
    resolve_backend,
)
from xlstm_jax.models.shared.init import small_init
from xlstm_jax.models.shared.norms import RMSNorm
from xlstm_jax.models.shared.projections import common_arguments
from xlstm_jax.models.shared.stack import Context

COUNTER_ITEMSIZE = 4
"""Bytes of a counter in the cache."""
SAMPLE_DTYPE, SAMPLE_HEAD_DIM = jnp.dtype("bfloat16"), 64
"""The heads with which `xlstm-jax doctor` finds out which backends can run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the attention layers of a model are, whatever the config that says so."""

    num_heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values, each shared by a group of query heads."""
    head_dim: int
    theta: float
    """Base of the wavelengths of rotary positions."""
    qk_norm: bool
    """Whether queries and keys of each head are normalised, with learned scales."""
    causal: bool
    masks_documents: bool
    """Whether tokens attend only to their own document."""
    backend: AttentionBackend
    max_state_length: int
    """Tokens that the cache can hold."""

    def heads_on_device(self, axis_name: str) -> tuple[int, int]:
        """Return how many heads of queries, and of keys and values, this device has."""
        size = axis_size(axis_name)
        if self.num_heads % size or self.kv_heads % size:
            raise ConfigError(
                f"{self.num_heads} heads of queries and {self.kv_heads} of keys and values cannot be split over the "
                f"{size} devices of mesh axis {axis_name!r}: both must be multiples of {size}."
            )
        return self.num_heads // size, self.kv_heads // size


class AttentionLayer(nn.Module):
    """Attention with rotary positions and grouped queries; heads are split over the model axis.

    Attributes:
        config: The config of the model.
        shape: The shape of attention.
        out_init: Initialises the output projection.
    """

    config: LanguageModelConfig
    shape: AttentionShape
    out_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: jax.Array, state: KVCache | None, context: Context) -> tuple[jax.Array, KVCache | None]:
        """Return the outputs, and the cache with these tokens if there is one or the context keeps the state."""
        config, shape = self.config, self.shape
        q, k, v = self._project(x)
        positions = _positions(x, state, context)
        q, k = apply_rotary_emb(q, k, *precompute_freqs(shape.head_dim, positions, theta=shape.theta))
        starts = _document_starts(x, state, context) if shape.masks_documents else None
        if state is None:
            y = multihead_attention(q, k, v, starts, shape.causal, backend=shape.backend, contiguous_segments=True)
            if context.keeps_state:
                state = append(init_cache(config, shape, x.shape[0]), k, v, positions, starts)
        else:
            state = append(state, k, v, positions, starts)
            y = cached_attention(q, state, starts, shape.backend)
        y = context.requested(y)
        out = RowDense(config.embedding_dim, kernel_init=self.out_init, name="out", **common_arguments(config))
        return out(y.reshape(*y.shape[:2], -1)), state

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute the queries, keys and values of this device's heads."""
        config, shape = self.config, self.shape
        init, common = small_init(config.embedding_dim), common_arguments(config)
        widths = {name: heads * shape.head_dim for name, heads in zip("qkv", _all_heads(shape), strict=True)}
        layers = [ColumnDense(width, kernel_init=init, name=name, **common) for name, width in widths.items()]
        own_queries, own_kv = shape.heads_on_device(config.parallel.model_axis_name)
        q, k, v = (
            y.reshape(*x.shape[:-1], number, shape.head_dim)
            for y, number in zip(apply_to_same(x, layers), (own_queries, own_kv, own_kv), strict=True)
        )
        if shape.qk_norm:
            norm = functools.partial(RMSNorm, config.norm_eps, jnp.dtype(config.param_dtype))
            q, k = norm(name="q_norm")(q), norm(name="k_norm")(k)
        return q, k, v


def _all_heads(shape: AttentionShape) -> tuple[int, int, int]:
    return shape.num_heads, shape.kv_heads, shape.kv_heads


def init_cache(config: LanguageModelConfig, shape: AttentionShape, batch_size: int) -> KVCache:
    """Return the state before the first token; inside a mesh, that of this device's heads."""
    _, num_heads = shape.heads_on_device(config.parallel.model_axis_name)
    return empty_cache(batch_size, shape.max_state_length, num_heads, shape.head_dim, jnp.dtype(config.dtype))


def _positions(x: jax.Array, state: KVCache | None, context: Context) -> jax.Array:
    """Return the position of each token: as given, or counted from the state on."""
    if context.positions is not None:
        return context.positions
    return _count_from(None if state is None else state.next_position, x)


def _document_starts(x: jax.Array, state: KVCache | None, context: Context) -> jax.Array | None:
    """Return the slot where the document of each token begins; `None` if all tokens belong to one document."""
    if state is None and context.document_borders is None:
        return None
    first = jnp.zeros(x.shape[:1], jnp.int32) if state is None else state.document_start
    if context.document_borders is None:
        return jnp.broadcast_to(first[:, None], x.shape[:2])
    slots = _count_from(None if state is None else state.length, x)
    starts = jnp.where(context.document_borders.astype(bool), slots, first[:, None])
    return running_max(starts)


def _count_from(first: jax.Array | None, x: jax.Array) -> jax.Array:
    """Number the tokens of each row, from 0 by default."""
    numbers = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32), x.shape[:2])
    return numbers if first is None else first[:, None] + numbers


def check_attention(config: LanguageModelConfig, shape: AttentionShape) -> None:
    """Raise a `ConfigError` if a model cannot have attention of this shape."""
    if shape.head_dim % 2:
        raise ConfigError(f"head_dim is {shape.head_dim}, but must be even: rotary positions turn pairs of features.")
    check_backend(shape.backend, jnp.dtype(config.dtype), shape.head_dim)


def attention_cost(config: LanguageModelConfig, shape: AttentionShape, length: int) -> cost.BlockCost:
    """Return the cost of an attention layer for a sequence length, without its norms over all features."""
    width, kv_width = shape.num_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    dense = functools.partial(cost.dense, length, use_bias=config.use_bias)
    cache = 2 * shape.max_state_length * kv_width * jnp.dtype(config.dtype).itemsize + 3 * COUNTER_ITEMSIZE
    return cost.total(
        [
            cost.vectors(*[shape.head_dim] * (2 if shape.qk_norm else 0)),
            *(dense(config.embedding_dim, size) for size in (width, kv_width, kv_width)),
            # Weights of attention are recomputed for their own gradients; their inputs may be saved.
            cost.batched(2 * 2 * length**2 * width)._replace(recomputed_norms=2 * length**2 * width, state_bytes=cache),
            dense(width, config.embedding_dim),
        ]
    )


def block_activations(
    config: LanguageModelConfig, shape: AttentionShape, ffn_dim: int, placement: Placement, num_post_normed: int = 0
) -> BlockActivations:
    """Return the activations of a block with attention and a gated feed-forward layer, in bytes for each token.

    Args:
        config: The config of the model.
        shape: The shape of attention.
        ffn_dim: The width of the feed-forward layer.
        placement: The minibatch and the device.
        num_post_normed: Features of branch outputs that the backward pass of post-norms reads.
    """
    itemsize, parts, dim = jnp.dtype(config.dtype).itemsize, placement.model_axis_size, config.embedding_dim
    width, kv_width = shape.num_heads * shape.head_dim / parts, shape.kv_heads * shape.head_dim / parts
    cell, weights, temporaries = _attention_memory(config, shape, placement)
    return BlockActivations(
        inputs=itemsize * dim,
        stream=itemsize * dim,
        projections=itemsize * (width + 2 * kv_width + 2 * ffn_dim / parts + num_post_normed),
        cell=cell,
        operands=itemsize * (width + ffn_dim / parts),
        rest=itemsize * (2 * dim + weights),
        temporaries=temporaries,
    )


def _attention_memory(
    config: LanguageModelConfig, shape: AttentionShape, placement: Placement
) -> tuple[float, float, float]:
    """Return what attention saves, how many weights, and what its backward pass holds in addition, for each token."""
    heads, itemsize = shape.num_heads / placement.model_axis_size, jnp.dtype(config.dtype).itemsize
    head_dim, length = shape.head_dim, placement.sequence_length
    if shape.backend == "xla" or not placement.has_flash_attention:
        return 0.0, heads * length, 2 * 4 * heads * length
    if not shape.masks_documents:
        return 0.0, 0.0, 0.0
    outputs = heads * (itemsize * head_dim + 4)
    has_kernel = shape.causal and config.dtype == "bfloat16" and tiling_problem(head_dim) is None
    if shape.backend != "cudnn" and placement.is_hopper and has_kernel:
        return outputs, 0.0, 4 * heads
    rows = max(placement.num_tokens // length, 1)
    slots = choose_slots(rows, length, math.ceil(heads), head_dim)
    if placement.has_packed_attention and head_dim <= LARGEST_HEAD_DIM and slots > 1:
        return outputs, 0.0, 4 * slots * heads * (head_dim + 2)
    return 0.0, 0.0, float(itemsize * length)


def describe_attention(config: LanguageModelConfig, shape: AttentionShape) -> str:
    """Describe the kernel of attention of a shape."""
    dtype = jnp.dtype(config.dtype)
    if shape.backend != "auto":
        return f"attention: {shape.backend}"
    if shape.masks_documents and mosaic_problem(dtype, shape.head_dim, causal=shape.causal) is None:
        return "attention: the kernels for Hopper GPUs, within documents"
    return f"attention: {choose_backend(dtype, shape.head_dim)[1]}"


ATTENTION_KERNEL = Kernel(
    "attention",
    tuple(backend for backend in BACKENDS if backend != "auto"),
    functools.partial(resolve_backend, dtype=SAMPLE_DTYPE, head_dim=SAMPLE_HEAD_DIM),
    functools.partial(choose_backend, SAMPLE_DTYPE, SAMPLE_HEAD_DIM),
)
CACHE_CAPACITY: StateCapacity[Any] = StateCapacity(
    max_tokens=lambda config: config.attention.max_state_length, num_held=lambda state: state.length
)
"""The limit of the cache, for configs whose `attention` is the shape of their attention layers."""
