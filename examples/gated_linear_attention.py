"""A cell of your own: gated linear attention, registered as a kind of block and trained by the normal command.

Run `PYTHONPATH=examples xlstm-jax train model.model_class=gated_linear_attention.Model model.block_kinds=gla`, with any
other settings; a list such as `model.block_kinds=[gla,attention,mlstm]` mixes the cell with those of the package.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import ColumnDense, RowDense
from xlstm_jax.models.blocks import BlockKind, cost, register_block_kind
from xlstm_jax.models.blocks.activations import BlockActivations
from xlstm_jax.models.shared.projections import common_arguments
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.models.xlstm.block import Block


@dataclasses.dataclass(kw_only=True)
class Config(XLSTMConfig):
    """An xLSTM whose stack can contain `gla` blocks."""

    decay_bias: float = 3.0
    """Initial bias of the decay: `sigmoid(3)` keeps 95 % of the memory at each token."""


class Layer(nn.Module):
    """`memory = decay * memory + key value^T`, read by the query; heads are split over the model axis."""

    config: Config

    @nn.compact
    def __call__(self, x, state, context):
        """Return the outputs and the memory after the last token."""
        config, common = self.config, common_arguments(self.config)
        q, k, v = (ColumnDense(config.embedding_dim, name=name, **common)(x) for name in "qkv")
        bias = nn.initializers.constant(config.decay_bias)
        decay = ColumnDense(config.num_heads, name="decay", **common | {"use_bias": True}, bias_init=bias)(x)
        q, k, v = (y.reshape(*x.shape[:2], decay.shape[-1], -1) for y in (q, k, v))
        decay = nn.sigmoid(decay)
        if context.document_borders is not None:  # a new document starts with an empty memory
            decay = jnp.where(context.document_borders[..., None], 0, decay)

        def step(memory, token):
            q, k, v, decay = token
            memory = decay[..., None, None] * memory + k[..., :, None] * v[..., None, :]
            return memory, jnp.einsum("bhk,bhkv->bhv", q, memory)

        state = init_state(config, x.shape[0]) if state is None else state
        tokens = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (q * q.shape[-1] ** -0.5, k, v, decay))
        state, hidden = jax.lax.scan(step, state, tokens)
        hidden = context.requested(jnp.moveaxis(hidden, 0, 1))
        y = RowDense(config.embedding_dim, name="out", **common)(hidden.reshape(*hidden.shape[:2], -1))
        return y, state


def init_state(config, batch_size):
    """Return an empty memory for this device's heads."""
    num_heads = config.num_heads // axis_size(config.parallel.model_axis_name)
    head_dim = config.embedding_dim // config.num_heads
    return jnp.zeros((batch_size, num_heads, head_dim, head_dim), config.dtype)


def block_cost(config, length):
    """Return parameters, state and FLOPs of a block; the cell's only matmul reads the memory."""
    dim, head_dim = config.embedding_dim, config.embedding_dim // config.num_heads
    projections = [cost.dense(length, dim, dim, use_bias=config.use_bias) for _ in range(4)]
    decay = cost.dense(length, dim, config.num_heads, use_bias=True)
    cell = cost.batched(2 * length * dim * head_dim)._replace(
        state_bytes=dim * head_dim * jnp.dtype(config.dtype).itemsize
    )
    ffn = cost.feed_forward(length, dim, config.ffn_hidden_dim, config.use_bias, has_norm=config.post_norm)
    return cost.total([cost.vectors(*[dim] * (4 if config.post_norm else 2)), *projections, decay, cell, ffn])


def block_activations(config, placement):
    """Return the bytes of activations for each token: the scan saves the memory of every token."""
    dim, ffn_dim = config.embedding_dim, config.ffn_hidden_dim / placement.model_axis_size
    own_dim, itemsize = dim / placement.model_axis_size, jnp.dtype(config.dtype).itemsize
    sizes = {"inputs": dim, "stream": dim, "projections": 3 * own_dim + 2 * ffn_dim, "operands": own_dim + ffn_dim}
    sizes |= {"cell": own_dim * dim / config.num_heads, "rest": 2 * dim}
    return BlockActivations(**{name: itemsize * size for name, size in sizes.items()})


register_block_kind(
    BlockKind(
        name="gla",
        config_class=Config,
        create=lambda config: Block(config, Layer, "gla", config.norm, config.ffn_hidden_dim, parent=None),
        init_state=init_state,
        cost=block_cost,
        activations=block_activations,
        num_heads=lambda config: config.num_heads,
        head_sizes=lambda config: {"embedding_dim": config.embedding_dim},
        fields=("decay_bias", "ffn_dim", "ffn_proj_factor", "ffn_round_up"),
    )
)


class Model(XLSTM):
    """An xLSTM whose stack can contain `gla` blocks."""

    config: Config
