"""The `transformer` block of Llama: attention and a feed-forward layer on a residual stream."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.models.blocks import cost
from xlstm_jax.models.blocks.kind import BlockKind, register_block_kind
from xlstm_jax.models.llama.attention import KVCache
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.llama.layer import (
    ATTENTION_KERNEL,
    CACHE_CAPACITY,
    AttentionLayer,
    attention_cost,
    block_activations,
    check_attention,
    describe_attention,
    init_cache,
)
from xlstm_jax.models.shared.feedforward import GatedFeedForward
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import RMSNorm
from xlstm_jax.models.shared.projections import common_arguments, concatenate_kernels
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
        """Return the outputs and the cache with these tokens."""
        y, state = SelfAttentionBlock(self.config, name="attn")(x, state, context)
        x = add_branch(context.requested(x), y)
        return add_branch(x, FFNBlock(self.config, name="ffn")(x, context.train)), state


class SelfAttentionBlock(nn.Module):
    """The residual branch of attention.

    Attributes:
        config: The config of the model.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: KVCache | None, context: Context) -> tuple[jax.Array, KVCache | None]:
        """Return what is added to the residual stream, and the cache with these tokens."""
        config = self.config
        layer = AttentionLayer(config, config.attention, _out_init(config))
        nn.share_scope(self, layer)  # The parameters of the layer and of its norm are siblings.
        y, state = layer(_pre_norm(config)(x), state, context)
        sow_spread(self, attn_out=y)
        return nn.Dropout(config.dropout_rate, deterministic=not context.train)(y), state


class FFNBlock(nn.Module):
    """The residual branch of the gated feed-forward layer; its hidden features are split over the model axis.

    Attributes:
        config: The config of the model.
    """

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Return what is added to the residual stream."""
        config = self.config
        layer = GatedFeedForward(
            config.ffn_hidden_dim,
            up_init=small_init(config.embedding_dim),
            down_init=_out_init(config),
            **common_arguments(config),
        )
        nn.share_scope(self, layer)  # The parameters of the layer and of its norm are siblings.
        y = layer(_pre_norm(config)(x))
        sow_spread(self, ffn_out=y)
        return nn.Dropout(config.dropout_rate, deterministic=not train)(y)


def _out_init(config: LlamaConfig) -> nn.initializers.Initializer:
    return wang_init(config.embedding_dim, 2 * config.num_blocks)


def _pre_norm(config: LlamaConfig) -> RMSNorm:
    return RMSNorm(config.norm_eps, jnp.dtype(config.param_dtype), name="pre_norm")


def _cost(config: LlamaConfig, length: int) -> cost.BlockCost:
    return cost.total(
        [
            cost.vectors(config.embedding_dim, config.embedding_dim),
            attention_cost(config, config.attention, length),
            cost.feed_forward(length, config.embedding_dim, config.ffn_hidden_dim, config.use_bias),
        ]
    )


register_block_kind(
    BlockKind(
        name="transformer",
        config_class=LlamaConfig,
        create=lambda config: TransformerBlock(config, parent=None),
        init_state=lambda config, batch_size: init_cache(config, config.attention, batch_size),
        cost=_cost,
        activations=lambda config, place: block_activations(config, config.attention, config.ffn_hidden_dim, place),
        describe_backend=lambda config: describe_attention(config, config.attention),
        kernel=ATTENTION_KERNEL,
        num_heads=lambda config: config.kv_heads,
        check=lambda config: check_attention(config, config.attention),
        capacity=CACHE_CAPACITY,
        lay_out_for_decoding=concatenate_kernels,
    )
)
