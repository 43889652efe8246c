"""The Transformer block: attention and a feed-forward layer on a residual stream."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import ColumnDense, RowDense, apply_to_same
from xlstm_jax.kernels.attention.documents import running_max
from xlstm_jax.models.llama.attention import (
    KVCache,
    append,
    apply_rotary_emb,
    cached_attention,
    empty_cache,
    multihead_attention,
    precompute_freqs,
)
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.shared.feedforward import GatedFeedForward
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import RMSNorm
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import sow_spread
from xlstm_jax.models.shared.utils import add_branch


class TransformerBlock(nn.Module):
    """`x + attn(norm(x))`, then `x + ffn(norm(x))`.

    Attributes:
        config: The config of the model.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: KVCache | None, context: Context) -> tuple[jax.Array, KVCache | None]:
        """Return the outputs and the cache with these tokens in it."""
        y, state = SelfAttentionBlock(self.config, name="attn")(x, state, context)
        x = add_branch(context.asked_for(x), y)
        return add_branch(x, FFNBlock(self.config, name="ffn")(x, context.train)), state


class SelfAttentionBlock(nn.Module):
    """The residual branch of attention; heads are split over the model axis.

    Attributes:
        config: The config of the model.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: KVCache | None, context: Context) -> tuple[jax.Array, KVCache | None]:
        """Return what to add to the residual stream and the cache with these tokens in it."""
        config = self.config
        q, k, v = self._project(_norm(config, "pre_norm")(x))
        positions = _positions(x, state, context)
        q, k = apply_rotary_emb(q, k, *precompute_freqs(config.head_dim, positions, theta=config.theta))
        starts = _document_starts(x, state, context) if config.mask_across_document_boundaries else None
        if state is None:
            backend = config.attention_backend
            y = multihead_attention(q, k, v, starts, config.causal, backend=backend, contiguous_segments=True)
            if context.keeps_state:
                state = append(init_cache(config, x.shape[0]), k, v, positions, starts)
        else:
            state = append(state, k, v, positions, starts)
            y = cached_attention(q, state, starts, config.attention_backend)
        y = context.asked_for(y)
        out = RowDense(config.embedding_dim, kernel_init=_out_init(config), name="out", **_common(config))
        y = out(y.reshape(*y.shape[:2], -1))
        sow_spread(self, attn_out=y)
        return nn.Dropout(config.dropout_rate, deterministic=not context.train)(y), state

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute the queries, keys and values of this device's heads."""
        config = self.config
        heads = {"q": config.num_heads, "k": config.kv_heads, "v": config.kv_heads}
        init = small_init(config.embedding_dim)
        layers = [
            ColumnDense(number * config.head_dim, kernel_init=init, name=name, **_common(config))
            for name, number in heads.items()
        ]
        q, k, v = (
            y.reshape(*x.shape[:-1], _own_heads(config, number), config.head_dim)
            for y, number in zip(apply_to_same(x, layers), heads.values(), strict=True)
        )
        if config.qk_norm:
            q, k = _norm(config, "q_norm")(q), _norm(config, "k_norm")(k)
        return q, k, v


class FFNBlock(nn.Module):
    """The residual branch of the gated feed-forward layer; its hidden features are split over the model axis.

    Attributes:
        config: The config of the model.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return what to add to the residual stream."""
        config = self.config
        layer = GatedFeedForward(
            config.ffn_hidden_dim,
            up_init=small_init(config.embedding_dim),
            down_init=_out_init(config),
            **_common(config),
        )
        # Its parameters lie beside those of the norm.
        nn.share_scope(self, layer)
        y = layer(_norm(config, "pre_norm")(x))
        sow_spread(self, ffn_out=y)
        return nn.Dropout(config.dropout_rate, deterministic=not train)(y)


def init_cache(config: LlamaConfig, batch_size: int) -> KVCache:
    """Return the state of a block before the first token; inside a mesh, that of this device's heads."""
    num_heads = _own_heads(config, config.kv_heads)
    return empty_cache(batch_size, config.max_state_length, num_heads, config.head_dim, jnp.dtype(config.dtype))


def _own_heads(config: LlamaConfig, num_heads: int) -> int:
    """Return how many of the heads this device has."""
    size = axis_size(config.parallel.model_axis_name)
    if num_heads % size:
        raise ValueError(
            f"{config.num_heads} heads of queries and {config.kv_heads} of keys and values cannot be split over the "
            f"{size} devices of mesh axis {config.parallel.model_axis_name!r}: both must be multiples of {size}."
        )
    return num_heads // size


def _positions(x: jax.Array, state: KVCache | None, context: Context) -> jax.Array:
    """Return the position of each token: as given, else counted on from the state."""
    if context.positions is not None:
        return context.positions
    return _count_from(None if state is None else state.next_position, x)


def _document_starts(x: jax.Array, state: KVCache | None, context: Context) -> jax.Array | None:
    """Return the slot where the document of each token begins; `None` if all tokens are of one document."""
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


def _out_init(config: LlamaConfig) -> nn.initializers.Initializer:
    return wang_init(config.embedding_dim, 2 * config.num_blocks)


def _norm(config: LlamaConfig, name: str | None = None) -> RMSNorm:
    return RMSNorm(config.norm_eps, jnp.dtype(config.param_dtype), name=name)


def _common(config: LlamaConfig) -> dict:
    return {
        "axis_name": config.parallel.model_axis_name,
        "use_bias": config.use_bias,
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
        "float8": config.float8,
    }
