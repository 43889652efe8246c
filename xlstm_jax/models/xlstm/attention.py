"""The `attention` block of xLSTM stacks: its registry entry. Its layer is the one of Llama."""

from flax import linen as nn

from xlstm_jax.configs import ConfigError
from xlstm_jax.models.blocks import cost
from xlstm_jax.models.blocks.activations import BlockActivations, Placement
from xlstm_jax.models.blocks.kind import BlockKind, register_block_kind
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
from xlstm_jax.models.shared.init import wang_init
from xlstm_jax.models.shared.projections import concatenate_kernels
from xlstm_jax.models.xlstm.block import Block
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.mlstm import FFN_FIELDS, num_post_normed


def _layer(config: XLSTMConfig, name: str) -> nn.Module:
    return AttentionLayer(config, config.attention, wang_init(config.embedding_dim, config.num_blocks), name=name)


def _create(config: XLSTMConfig) -> Block:
    return Block(config, _layer, "attn", config.norm, config.ffn_hidden_dim, parent=None)


def _cost(config: XLSTMConfig, length: int) -> cost.BlockCost:
    dim = config.embedding_dim
    return cost.total(
        [
            cost.vectors(*[dim] * (4 if config.post_norm else 2)),
            attention_cost(config, config.attention, length),
            cost.feed_forward(length, dim, config.ffn_hidden_dim, config.use_bias, has_norm=config.post_norm),
        ]
    )


def _activations(config: XLSTMConfig, placement: Placement) -> BlockActivations:
    post_normed = num_post_normed(config, 2)
    return block_activations(config, config.attention, config.ffn_hidden_dim, placement, post_normed)


def _check(config: XLSTMConfig) -> None:
    if config.num_heads % config.attention.kv_heads:
        raise ConfigError(f"num_kv_heads {config.num_kv_heads} does not divide num_heads {config.num_heads}.")
    check_attention(config, config.attention)


register_block_kind(
    BlockKind(
        name="attention",
        config_class=XLSTMConfig,
        create=_create,
        init_state=lambda config, batch_size: init_cache(config, config.attention, batch_size),
        cost=_cost,
        activations=_activations,
        describe_backend=lambda config: describe_attention(config, config.attention),
        kernel=ATTENTION_KERNEL,
        num_heads=lambda config: config.attention.kv_heads,
        head_sizes=lambda config: {"embedding_dim": config.embedding_dim},
        fields=("num_kv_heads", "theta", "attention_backend", "max_state_length", *FFN_FIELDS),
        check=_check,
        capacity=CACHE_CAPACITY,
        lay_out_for_decoding=concatenate_kernels,
    )
)
