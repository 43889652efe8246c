"""The `mlstm_up` block of the original paper: its layer and its registry entry.

The mLSTM lies between an up- and a down-projection, with a convolution and a skip connection.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.array_utils import axis_size, split_array_over_mesh
from xlstm_jax.distributed.dense import ColumnDense, RowDense, SplitModule, apply_to_same
from xlstm_jax.kernels.mlstm import MLSTMState, empty_state
from xlstm_jax.kernels.mlstm.state import state_dtype
from xlstm_jax.models.blocks import cost
from xlstm_jax.models.blocks.activations import BlockActivations, Placement
from xlstm_jax.models.blocks.kind import BlockKind, register_block_kind
from xlstm_jax.models.shared.conv import CausalConv
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import MultiHeadNorm
from xlstm_jax.models.shared.projections import common_arguments
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.utils import soft_cap_logits
from xlstm_jax.models.xlstm.block import Block
from xlstm_jax.models.xlstm.config import XLSTMConfig
from xlstm_jax.models.xlstm.mlstm import (
    CELL_FIELDS,
    MLSTM_KERNEL,
    cell_cost,
    cell_memory,
    describe_cell,
    num_post_normed,
    run_cell,
    sow_cell,
)


class MLSTMUpState(NamedTuple):
    """The state of an `mlstm_up` block: the last inputs of its convolution, and the memory of its cell."""

    conv: Float[Array, "b t c"]
    cell: MLSTMState


class MLSTMUpLayer(SplitModule):
    """Up-projection, convolution, block-diagonal projections, the mLSTM cell, norm, skip, gate, down-projection.

    Attributes:
        config: The config of the model.
    """

    config: XLSTMConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, state: MLSTMUpState | None, context: Context
    ) -> tuple[jax.Array, MLSTMUpState | None]:
        """Return the outputs, and the state after the last position if the context keeps it."""
        config, axis_name = self.config, self.config.parallel.model_axis_name
        num_heads, param_dtype = config.num_heads // axis_size(axis_name), jnp.dtype(config.param_dtype)
        conv_state, cell = (_empty_conv_state(config, x.shape[0]), None) if state is None else state
        up_init, common = small_init(config.embedding_dim), common_arguments(config)
        wide = [ColumnDense(config.inner_dim, kernel_init=up_init, name=name, **common) for name in ("up", "gate")]
        inner, gate = apply_to_same(x, wide)
        conv = CausalConv(config.conv_kernel_size, axis_name, jnp.dtype(config.dtype), param_dtype, name="conv")
        convolved, conv_state = conv(inner, conv_state, context.document_borders)
        activated = nn.silu(convolved)
        q, k, v = (
            BlockDiagonalDense(config.qkv_block_size, config, name=name)(inputs)
            for name, inputs in (("q", activated), ("k", activated), ("v", inner))
        )
        igate, fgate = (
            _GateOfAll(name, config, name=name)(jnp.stack([q, k, v], axis=-2)).astype(config.gate_dtype)
            for name in ("igate", "fgate")
        )
        igate, fgate = (soft_cap_logits(gate, config.up_gate_soft_cap) for gate in (igate, fgate))
        q, k, v = (y.reshape(*y.shape[:-1], num_heads, -1) for y in (q, k, v))
        hidden, cell = run_cell(config, q, k, v, igate, fgate, cell, context)
        hidden, activated, gate = (context.requested(y) for y in (hidden, activated, gate))
        norm = MultiHeadNorm(axis_name, config.norm_eps, param_dtype, config.paper_norm, name="multihead_norm")
        normed = norm(hidden)
        skip = self.split_param("skip", nn.initializers.ones, (config.inner_dim,), param_dtype, 0, axis_name)
        gated = (normed + skip.astype(normed.dtype) * activated) * nn.silu(gate)
        down_init = wang_init(config.embedding_dim, config.num_blocks)
        sow_cell(self, q=q, k=k, v=v, igate=igate, fgate=fgate, hidden=hidden, normed=normed, gated=gated)
        y = RowDense(config.embedding_dim, kernel_init=down_init, name="down", **common)(gated)
        return y, None if cell is None else MLSTMUpState(conv_state, cell)


class BlockDiagonalDense(SplitModule):
    """Dense layer whose kernel is block-diagonal: each group of features is mixed separately.

    Attributes:
        block_size: The number of features in a group.
        config: The config of the model.
    """

    block_size: int
    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform this device's features."""
        config, axis_name, dtype = self.config, self.config.parallel.model_axis_name, jnp.dtype(self.config.dtype)
        num_blocks = x.shape[-1] * axis_size(axis_name) // self.block_size
        shape = (num_blocks, self.block_size, self.block_size)
        init = small_init(config.embedding_dim)
        kernel = self.split_param("kernel", init, shape, jnp.dtype(config.param_dtype), 0, axis_name)
        groups = x.astype(dtype).reshape(*x.shape[:-1], -1, self.block_size)
        return jnp.einsum("...ni,nio->...no", groups, kernel.astype(dtype)).reshape(x.shape)


class _GateOfAll(SplitModule):
    """Pre-activations of a gate for this device's heads, from the queries, keys and values of all heads."""

    gate: str
    config: XLSTMConfig

    @nn.compact
    def __call__(self, qkv: Float[Array, "b s 3 c"]) -> Float[Array, "b s h"]:
        config, axis_name, dtype = self.config, self.config.parallel.model_axis_name, jnp.dtype(self.config.gate_dtype)
        param_dtype = jnp.dtype(config.param_dtype)
        shape = (3, config.inner_dim, config.num_heads)
        kernel = self.split_param("kernel", nn.initializers.zeros, shape, param_dtype, 1, axis_name)
        bias_init = {
            "igate": nn.initializers.normal(0.1),
            "fgate": lambda _key, shape, dtype: jnp.asarray(np.linspace(3.0, 6.0, *shape), dtype),
        }[self.gate]
        bias = self.param("bias", bias_init, (config.num_heads,), param_dtype)
        gates = jnp.einsum("...gc,gch->...h", qkv.astype(dtype), kernel.astype(dtype))
        if axis_size(axis_name) > 1:
            gates = lax.psum(gates, axis_name)
        return split_array_over_mesh(gates + bias.astype(dtype), axis_name, split_axis=-1)


def init_mlstm_up_state(config: XLSTMConfig, batch_size: int) -> MLSTMUpState:
    """Return the state of an `mlstm_up` block before the first token."""
    num_heads = config.num_heads // axis_size(config.parallel.model_axis_name)
    head_dim = config.inner_dim // config.num_heads
    cell = empty_state(batch_size, num_heads, head_dim, head_dim, state_dtype(config.dtype))
    return MLSTMUpState(_empty_conv_state(config, batch_size), cell)


def _empty_conv_state(config: XLSTMConfig, batch_size: int) -> Float[Array, "b t c"]:
    num_channels = config.inner_dim // axis_size(config.parallel.model_axis_name)
    return jnp.zeros((batch_size, config.conv_kernel_size - 1, num_channels), config.dtype)


def _head_dim(config: XLSTMConfig) -> int:
    return config.inner_dim // config.num_heads


def _create(config: XLSTMConfig) -> Block:
    return Block(config, MLSTMUpLayer, "mlstm", config.paper_norm, parent=None)


def _cost(config: XLSTMConfig, length: int) -> cost.BlockCost:
    dim, inner_dim = config.embedding_dim, config.inner_dim
    dense = functools.partial(cost.dense, length, use_bias=config.use_bias)
    return cost.total(
        [
            cost.vectors(dim, inner_dim, inner_dim),
            cost.vectors(*[dim] * (1 if config.post_norm else 0)),
            *(dense(dim, inner_dim) for _ in ("up", "gate")),
            cost.causal_conv(config.conv_kernel_size, inner_dim, jnp.dtype(config.dtype).itemsize),
            *(cost.block_diagonal(length, inner_dim, config.qkv_block_size) for _ in "qkv"),
            *(cost.dense(length, 3 * inner_dim, config.num_heads, use_bias=True) for _ in ("igate", "fgate")),
            cell_cost(config, length, _head_dim(config), _head_dim(config)),
            dense(inner_dim, dim, is_last=not config.post_norm),
        ]
    )


def _activations(config: XLSTMConfig, placement: Placement) -> BlockActivations:
    itemsize, dim = jnp.dtype(config.dtype).itemsize, config.embedding_dim
    inner_dim = config.inner_dim / placement.model_axis_size
    cell, temporaries = cell_memory(config, placement, _head_dim(config), _head_dim(config))
    qkv = 3 * inner_dim * jnp.dtype(config.gate_dtype).itemsize  # as the gates read them
    return BlockActivations(
        inputs=itemsize * dim,
        stream=0,
        projections=itemsize * (2 * inner_dim + num_post_normed(config, 1)),
        cell=cell,
        operands=itemsize * inner_dim,
        rest=itemsize * (dim + 6 * inner_dim) + qkv,
        temporaries=temporaries,
    )


def _check(config: XLSTMConfig) -> None:
    if config.inner_dim % config.qkv_block_size:
        raise ConfigError(f"inner_dim {config.inner_dim} is no multiple of qkv_block_size {config.qkv_block_size}.")


register_block_kind(
    BlockKind(
        name="mlstm_up",
        config_class=XLSTMConfig,
        create=_create,
        init_state=init_mlstm_up_state,
        cost=_cost,
        activations=_activations,
        describe_backend=lambda config: describe_cell(config, _head_dim(config), _head_dim(config)),
        kernel=MLSTM_KERNEL,
        num_heads=lambda config: config.num_heads,
        head_sizes=lambda config: {"inner_dim": config.inner_dim},
        fields=("up_proj_factor", "qkv_block_size", "up_gate_soft_cap", "conv_kernel_size", "paper_norm", *CELL_FIELDS),
        check=_check,
    )
)
