"""The mLSTM layer of xLSTM-7B."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import RowDense
from xlstm_jax.kernels.mlstm import MLSTMState, empty_state, mlstm, mlstm_step
from xlstm_jax.kernels.mlstm.state import state_dtype
from xlstm_jax.kernels.norms.reference import standardize
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import LayerNorm, MultiHeadNorm
from xlstm_jax.models.shared.projections import project
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import COLLECTION, sow_gates, sow_mean, sow_spread
from xlstm_jax.models.shared.utils import soft_cap_logits
from xlstm_jax.models.xlstm.config import XLSTMConfig


class MLSTMLayer(nn.Module):
    """Projections, the mLSTM cell, a norm over each head and an output gate; heads are split over the model axis.

    Attributes:
        config: The config of the model.
    """

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: MLSTMState | None, context: Context) -> tuple[jax.Array, MLSTMState | None]:
        """Return the outputs, and the state after the last position if it is asked for."""
        config = self.config
        num_heads = config.num_heads // axis_size(config.parallel.model_axis_name)
        layers = self._projections() | self._gates()
        *heads, output_gate, igate, fgate = project(self, x, layers, **common_arguments(config))
        q, k, v = (part.reshape(*x.shape[:-1], num_heads, -1) for part in heads)
        if config.qk_norm:
            q, k = self._normalised(q, "q_norm"), self._normalised(k, "k_norm")
        igate, fgate = (soft_cap_logits(gate, config.gate_soft_cap) for gate in (igate, fgate))
        hidden, state = run_cell(config, q, k, v, igate, fgate, state, context)
        hidden, output_gate = context.asked_for(hidden), context.asked_for(output_gate)
        norm = MultiHeadNorm(
            config.parallel.model_axis_name, config.norm_eps, jnp.dtype(config.param_dtype), name="multihead_norm"
        )
        gated = norm.gated(hidden, output_gate)
        if self.is_mutable_collection(COLLECTION):
            sow_mean(self, mean_output_gate=nn.sigmoid(output_gate))
            sow_cell(self, q=q, k=k, v=v, igate=igate, fgate=fgate, hidden=hidden, normed=norm(hidden), gated=gated)
        out = RowDense(
            config.embedding_dim,
            kernel_init=wang_init(config.embedding_dim, config.num_blocks),
            name="out",
            **common_arguments(config),
        )
        return out(gated), state

    def _normalised(self, x: jax.Array, name: str) -> jax.Array:
        """Standardise the features of each head, with a learned scale if there is one."""
        config = self.config
        if not config.qk_norm_scale:
            return standardize(x, config.norm_eps)
        return LayerNorm(config.norm_eps, jnp.dtype(config.param_dtype), name=name)(x)

    def _projections(self) -> dict[str, dict[str, Any]]:
        """Return the layers that see the input."""
        config = self.config
        init = small_init(config.embedding_dim)
        return {
            "q": {"features": config.qk_dim, "kernel_init": init},
            "k": {"features": config.qk_dim, "kernel_init": init},
            "v": {"features": config.v_dim, "kernel_init": init},
            "ogate": {"features": config.v_dim, "kernel_init": nn.initializers.zeros},
        }

    def _gates(self) -> dict[str, dict[str, Any]]:
        """Return the layers of the pre-activations of the gates, one for each head."""
        config = self.config
        biases = {
            "igate": np.full(config.num_heads, config.input_gate_bias_init),
            "fgate": np.linspace(3.0, 6.0, config.num_heads),
        }
        return {
            name: {
                "features": config.num_heads,
                "use_bias": True,
                "dtype": jnp.dtype(config.gate_dtype),
                "float8": False,
                "kernel_init": nn.initializers.zeros,
                "bias_init": lambda _key, _shape, dtype, bias=bias: jnp.asarray(bias, dtype),
            }
            for name, bias in biases.items()
        }


def sow_cell(
    module: nn.Module,
    *,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    igate: jax.Array,
    fgate: jax.Array,
    hidden: jax.Array,
    normed: jax.Array,
    gated: jax.Array,
) -> None:
    """Sow statistics of what goes into an mLSTM cell and of what comes out: as it is, normalised, and gated."""
    sow_spread(module, q=q, k=k, v=v, h_state=hidden, h_state_norm=normed, h_state_out=gated)
    sow_mean(module, q_mean=q, k_mean=k, v_mean=v)
    sow_gates(module, igate=igate, fgate=fgate)


def run_cell(
    config: XLSTMConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    igate: jax.Array,
    fgate: jax.Array,
    state: MLSTMState | None,
    context: Context,
) -> tuple[jax.Array, MLSTMState | None]:
    """Run the mLSTM cell: one step for one token, a form for sequences otherwise."""
    if state is not None and q.shape[1] == 1 and context.document_borders is None:
        token = [x[:, 0] for x in (q, k, v, igate, fgate)]
        hidden, last = mlstm_step(
            *token, state=state, backend=config.mlstm_backend, input_gate=config.input_gate, eps=config.cell_eps
        )
        return hidden[:, None], last
    result: Any = mlstm(
        q,
        k,
        v,
        igate,
        fgate,
        state=state,
        return_state=context.keeps_state,
        resets=context.document_borders,
        chunk_size=config.chunk_size,
        backend=config.mlstm_backend,
        input_gate=config.input_gate,
        eps=config.cell_eps,
    )
    hidden, last = result if context.keeps_state else (result, None)
    return hidden, last


def init_mlstm_state(config: XLSTMConfig, batch_size: int) -> MLSTMState:
    """Return the state of an `mlstm` block before the first token."""
    num_heads = config.num_heads // axis_size(config.parallel.model_axis_name)
    head_dims = config.qk_dim // config.num_heads, config.v_dim // config.num_heads
    return empty_state(batch_size, num_heads, *head_dims, state_dtype(config.dtype))


def common_arguments(config: XLSTMConfig) -> dict[str, Any]:
    """Return what all projections of a model have in common."""
    return {
        "axis_name": config.parallel.model_axis_name,
        "use_bias": config.use_bias,
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.dtype(config.param_dtype),
        "float8": config.float8,
    }
