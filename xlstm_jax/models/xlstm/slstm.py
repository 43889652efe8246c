"""The `slstm` block of the original paper: its layer and its registry entry.

The layer has a convolution, block-diagonal gates and a recurrence within each head.
"""

import functools
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from xlstm_jax.distributed.array_utils import axis_size, fold_rng_over_axis, gather_whole, split_array_over_mesh
from xlstm_jax.distributed.dense import SplitModule
from xlstm_jax.kernels.mlstm.state import state_dtype
from xlstm_jax.kernels.slstm import SLSTMState, api, empty_state, slstm, slstm_step
from xlstm_jax.models.blocks import cost
from xlstm_jax.models.blocks.activations import BlockActivations, Placement
from xlstm_jax.models.blocks.kind import BlockKind, Kernel, register_block_kind
from xlstm_jax.models.shared.conv import CausalConv
from xlstm_jax.models.shared.norms import MultiHeadNorm
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import sow_spread
from xlstm_jax.models.xlstm.block import Block
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.mlstm import num_post_normed
from xlstm_jax.models.xlstm.mlstm_up import BlockDiagonalDense


class SLSTMBlockState(NamedTuple):
    """The state of an `slstm` block: the last inputs of its convolution, and the memory of its cell."""

    conv: Float[Array, "b t c"]
    cell: SLSTMState


class SLSTMLayer(SplitModule):
    """Convolution, gates, the sLSTM cell and a norm over each head; heads are split over the model axis.

    Attributes:
        config: The config of the model.
    """

    config: XLSTMConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, state: SLSTMBlockState | None, context: Context
    ) -> tuple[jax.Array, SLSTMBlockState]:
        """Return the outputs and the state after the last position."""
        config, axis_name = self.config, self.config.parallel.model_axis_name
        dtype, param_dtype = jnp.dtype(config.dtype), jnp.dtype(config.param_dtype)
        state = init_slstm_state(config, x.shape[0]) if state is None else state
        x = split_array_over_mesh(x, axis_name, split_axis=-1)
        conv = CausalConv(config.conv_kernel_size, axis_name, dtype, param_dtype, name="conv")
        convolved, conv_state = conv(x, state.conv, context.document_borders)
        activated = nn.silu(convolved)
        head_dim = config.embedding_dim // config.num_heads
        gates = jnp.stack(
            [
                BlockDiagonalDense(head_dim, config, name=name)(inputs).reshape(*x.shape[:2], -1, head_dim)
                for name, inputs in (("igate", activated), ("fgate", activated), ("zgate", x), ("ogate", x))
            ],
            axis=2,
        )
        shape = (config.num_heads, 4, head_dim)
        bias = self.split_param("bias", self._init_bias(context), shape, param_dtype, 0, axis_name)
        gates = gates.astype(config.gate_dtype) + jnp.moveaxis(bias, 1, 0).astype(config.gate_dtype)
        recurrent = self.split_param(
            "recurrent_kernel",
            nn.initializers.zeros,
            (config.num_heads, head_dim, 4, head_dim),
            param_dtype,
            0,
            axis_name,
        )
        hidden, cell = self._run_cell(gates, recurrent.astype(dtype), state.cell, context)
        hidden = context.requested(hidden)
        dropout = nn.Dropout(config.dropout_rate, deterministic=not context.train)
        hidden = dropout(hidden.astype(dtype), rng=self._dropout_key(context))
        norm = MultiHeadNorm(axis_name, config.norm_eps, param_dtype, config.paper_norm, name="multihead_norm")
        normed = norm(hidden)
        sow_spread(self, h_state=hidden, h_state_norm=normed)
        return gather_whole(normed, (None, None, axis_name)), SLSTMBlockState(conv_state, cell)

    def _run_cell(
        self, gates: jax.Array, recurrent: jax.Array, state: SLSTMState, context: Context
    ) -> tuple[jax.Array, SLSTMState]:
        if gates.shape[1] == 1 and context.document_borders is None:
            hidden, state = slstm_step(gates[:, 0], recurrent, state)
            return hidden[:, None], state
        resets, backend = context.document_borders, self.config.slstm_backend
        result: Any = slstm(gates, recurrent, state=state, return_state=True, resets=resets, backend=backend)
        hidden, state = result
        return hidden, state

    def _dropout_key(self, context: Context) -> jax.Array | None:
        """Return a key for this device's heads, or `None` to use the layer's key if the device has all heads."""
        axis_name, is_on = self.config.parallel.model_axis_name, context.train and self.config.dropout_rate > 0
        if not is_on or axis_size(axis_name) == 1:
            return None
        return fold_rng_over_axis(self.make_rng("dropout"), axis_name)

    def _init_bias(self, context: Context) -> nn.initializers.Initializer:
        """Spread the forget gates of a head over time scales, more evenly in deeper blocks.

        NumPy computes them for all blocks: XLA would round them differently where the index of the block is traced.
        """
        num_blocks = self.config.num_blocks

        def init(key, shape, dtype):
            del key
            _, _, head_dim = shape
            place = np.arange(head_dim) / max(head_dim - 1, 1)
            depth = np.arange(num_blocks)[:, None] / max(num_blocks - 1, 1)
            forget = jnp.asarray(5.0 - 12.0 * place ** (0.3 + 1.3 * depth), dtype)
            return jnp.zeros(shape, dtype).at[:, 1].set(forget[context.block_index])

        return init


def init_slstm_state(config: XLSTMConfig, batch_size: int) -> SLSTMBlockState:
    """Return the state of an `slstm` block before the first token."""
    size = axis_size(config.parallel.model_axis_name)
    conv = jnp.zeros((batch_size, config.conv_kernel_size - 1, config.embedding_dim // size), config.dtype)
    head_dim = config.embedding_dim // config.num_heads
    dtype = state_dtype(config.gate_dtype)
    return SLSTMBlockState(conv, empty_state(batch_size, config.num_heads // size, head_dim, dtype))


def _create(config: XLSTMConfig) -> Block:
    activation = functools.partial(nn.gelu, approximate=False)
    return Block(config, SLSTMLayer, "slstm", config.paper_norm, config.slstm_ffn_dim, activation, parent=None)


def _cost(config: XLSTMConfig, length: int) -> cost.BlockCost:
    dim, head_dim = config.embedding_dim, config.embedding_dim // config.num_heads
    return cost.total(
        [
            cost.vectors(dim, 4 * dim, dim, dim),
            cost.vectors(*[dim] * (2 if config.post_norm else 0)),
            cost.causal_conv(config.conv_kernel_size, dim, jnp.dtype(config.dtype).itemsize),
            *(cost.block_diagonal(length, dim, head_dim) for _ in "ifzo"),
            _cell_cost(length, dim, head_dim, state_dtype(config.gate_dtype).itemsize),
            cost.feed_forward(length, dim, config.slstm_ffn_dim, config.use_bias, has_norm=config.post_norm),
        ]
    )


def _cell_cost(length: int, dim: int, head_dim: int, itemsize: int) -> cost.BlockCost:
    """Return the cost of the recurrence.

    The backward pass has three matmuls: the recomputed pre-activations, the gradient of the hidden state and that of
    the kernel.
    """
    recurrent = 4 * dim * head_dim
    return cost.batched(2 * length * recurrent, backward=3 * 2 * length * recurrent)._replace(
        recomputed_dots=0, recomputed_norms=0, parameters=recurrent, state_bytes=4 * dim * itemsize
    )


def _activations(config: XLSTMConfig, placement: Placement) -> BlockActivations:
    itemsize, gate = jnp.dtype(config.dtype).itemsize, jnp.dtype(config.gate_dtype).itemsize
    dim, own_dim = config.embedding_dim, config.embedding_dim / placement.model_axis_size
    ffn_dim = config.slstm_ffn_dim / placement.model_axis_size
    return BlockActivations(
        inputs=itemsize * dim,
        stream=itemsize * dim,
        projections=itemsize * (2 * ffn_dim + num_post_normed(config, 2)),
        cell=own_dim * (gate + 4 * 6),  # hidden states; pre-activations and memories of each position in float32
        operands=itemsize * ffn_dim,
        rest=itemsize * (3 * dim + 3 * own_dim) + 4 * own_dim * gate,
    )


def _describe_backend(config: XLSTMConfig) -> str:
    is_auto, head_dim = config.slstm_backend == "auto", config.embedding_dim // config.num_heads
    return f"sLSTM: {api.choose_backend(head_dim, config.dtype)[1] if is_auto else config.slstm_backend}"


register_block_kind(
    BlockKind(
        name="slstm",
        config_class=XLSTMConfig,
        create=_create,
        init_state=init_slstm_state,
        cost=_cost,
        activations=_activations,
        describe_backend=_describe_backend,
        kernel=Kernel("sLSTM", get_args(api.Form), api.resolve_backend, api.choose_backend),
        num_heads=lambda config: config.num_heads,
        head_sizes=lambda config: {"embedding_dim": config.embedding_dim},
        fields=("slstm_ffn_factor", "slstm_backend", "conv_kernel_size", "paper_norm"),
    )
)
