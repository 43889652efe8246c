"""The sLSTM layer of the original paper: a convolution, block-diagonal gates and a recurrence within each head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float

from xlstm_jax.distributed.array_utils import axis_size, fold_rng_over_axis, gather_whole, split_array_over_mesh
from xlstm_jax.distributed.dense import SplitModule
from xlstm_jax.kernels.mlstm.state import state_dtype
from xlstm_jax.kernels.slstm import SLSTMState, empty_state, slstm, slstm_step
from xlstm_jax.models.shared.conv import CausalConv
from xlstm_jax.models.shared.norms import MultiHeadNorm
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import sow_spread
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.mlstm_up import BlockDiagonalDense


class SLSTMBlockState(NamedTuple):
    """What an `slstm` block hands on: the last inputs of its convolution, and the memory of its cell."""

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
        hidden = context.asked_for(hidden)
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
        """Return a key for this device's heads, or `None` for the layer's own, where it has all of them."""
        axis_name, is_on = self.config.parallel.model_axis_name, context.train and self.config.dropout_rate > 0
        if not is_on or axis_size(axis_name) == 1:
            return None
        return fold_rng_over_axis(self.make_rng("dropout"), axis_name)

    def _init_bias(self, context: Context) -> nn.initializers.Initializer:
        """Spread the forget gates of a head over time scales, more evenly the deeper the block.

        NumPy computes them for all blocks: where the number of the block is traced, XLA would round them differently.
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
