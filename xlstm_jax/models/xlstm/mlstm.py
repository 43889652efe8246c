"""The `mlstm` block of xLSTM-7B: its layer and its registry entry, and the mLSTM cell that `mlstm_up` blocks share."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from xlstm_jax.distributed.array_utils import axis_size
from xlstm_jax.distributed.dense import RowDense
from xlstm_jax.kernels.matmul.fused import WIDTH
from xlstm_jax.kernels.mlstm import MLSTMState, api, empty_state, mlstm, mlstm_step
from xlstm_jax.kernels.mlstm.hopper.tiling import choose_tiling, tiling_problem
from xlstm_jax.kernels.mlstm.state import state_dtype
from xlstm_jax.kernels.norms.reference import standardize
from xlstm_jax.models.blocks import cost
from xlstm_jax.models.blocks.activations import BlockActivations, Placement
from xlstm_jax.models.blocks.kind import BlockKind, Kernel, register_block_kind
from xlstm_jax.models.shared.init import small_init, wang_init
from xlstm_jax.models.shared.norms import LayerNorm, MultiHeadNorm
from xlstm_jax.models.shared.projections import common_arguments, concatenate_kernels, project
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.shared.statistics import COLLECTION, sow_gates, sow_mean, sow_spread
from xlstm_jax.models.shared.utils import soft_cap_logits
from xlstm_jax.models.xlstm.block import Block
from xlstm_jax.models.xlstm.config import XLSTMConfig


class MLSTMLayer(nn.Module):
    """Projections, the mLSTM cell, a norm over each head and an output gate; heads are split over the model axis.

    Attributes:
        config: The config of the model.
    """

    config: XLSTMConfig

    @nn.compact
    def __call__(self, x: jax.Array, state: MLSTMState | None, context: Context) -> tuple[jax.Array, MLSTMState | None]:
        """Return the outputs, and the state after the last position if the context keeps it."""
        config = self.config
        num_heads = config.num_heads // axis_size(config.parallel.model_axis_name)
        layers = self._projections() | self._gates()
        *heads, output_gate, igate, fgate = project(self, x, layers, **common_arguments(config))
        q, k, v = (part.reshape(*x.shape[:-1], num_heads, -1) for part in heads)
        if config.qk_norm:
            q, k = self._normalised(q, "q_norm"), self._normalised(k, "k_norm")
        igate, fgate = (soft_cap_logits(gate, config.gate_soft_cap) for gate in (igate, fgate))
        hidden, state = run_cell(config, q, k, v, igate, fgate, state, context)
        hidden, output_gate = context.requested(hidden), context.requested(output_gate)
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
        """Standardise the features of each head, and scale them with `qk_norm_scale`."""
        config = self.config
        if not config.qk_norm_scale:
            return standardize(x, config.norm_eps)
        return LayerNorm(config.norm_eps, jnp.dtype(config.param_dtype), name=name)(x)

    def _projections(self) -> dict[str, dict[str, Any]]:
        """Return the projections of the input."""
        config = self.config
        init = small_init(config.embedding_dim)
        return {
            "q": {"features": config.qk_dim, "kernel_init": init},
            "k": {"features": config.qk_dim, "kernel_init": init},
            "v": {"features": config.v_dim, "kernel_init": init},
            "ogate": {"features": config.v_dim, "kernel_init": nn.initializers.zeros},
        }

    def _gates(self) -> dict[str, dict[str, Any]]:
        """Return the projections to the pre-activations of the gates, one output for each head."""
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
    """Sow statistics of the inputs of an mLSTM cell and of its output: raw, normalised, and gated."""
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
    """Run the mLSTM cell: a step for a single token, a form for sequences otherwise."""
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


MLSTM_KERNEL = Kernel("mLSTM", get_args(api.Form), api.resolve_backend, api.choose_backend)
FFN_FIELDS = ("ffn_proj_factor", "ffn_round_up", "ffn_dim")
"""The fields of the feed-forward layer, which `mlstm` and `attention` blocks read."""
CELL_FIELDS = ("input_gate", "cell_eps", "chunk_size", "mlstm_backend")
"""The fields that both kinds of blocks with an mLSTM read."""


def describe_cell(config: XLSTMConfig, qk_dim: int, v_dim: int) -> str:
    """Describe the kernel of an mLSTM with heads of the given sizes."""
    is_auto = config.mlstm_backend == "auto"
    chosen = api.choose_backend(config.dtype, qk_dim, v_dim, config.cell_eps)[1] if is_auto else config.mlstm_backend
    return f"mLSTM: {chosen}"


def cell_cost(config: XLSTMConfig, length: int, qk_dim: int, v_dim: int) -> cost.BlockCost:
    """Return the cost of the chunkwise mLSTM with heads of the given sizes."""
    chunk_size = min(config.chunk_size, length)
    forward, backward = _multiply_adds(chunk_size, qk_dim, v_dim)
    padded = length + -length % chunk_size
    return cost.batched(
        2 * config.num_heads * padded * forward,
        backward=2 * config.num_heads * padded * backward,
        needed=2 * config.num_heads * length * 2 * qk_dim * v_dim,
    )._replace(
        recomputed_dots=0,
        recomputed_norms=0,
        state_bytes=state_dtype(config.dtype).itemsize * config.num_heads * (qk_dim * v_dim + qk_dim + 1),
    )


def _multiply_adds(chunk_size: int, qk_dim: int, v_dim: int) -> tuple[int, int]:
    """Return the multiply-adds of the chunkwise mLSTM for one position of a head, forward and backward."""
    memory, scores, values = qk_dim * v_dim, chunk_size * qk_dim, chunk_size * v_dim
    forward = {
        "memories": memory,
        "scores": scores,
        "numerator": memory + values,
    }
    backward = {
        "memories": memory,
        "scores": scores,
        "gradients of memories": memory,
        "gradients of scores": values,
        "gradients of queries": scores + memory,
        "gradients of keys": scores + memory,
        "gradients of values": values + memory,
    }
    return sum(forward.values()), sum(backward.values())


def cell_memory(config: XLSTMConfig, placement: Placement, qk_dim: int, v_dim: int) -> tuple[float, float]:
    """Return what the mLSTM saves, and what its backward pass holds in addition, in bytes for each token."""
    heads, itemsize = config.num_heads / placement.model_axis_size, jnp.dtype(config.dtype).itemsize
    hidden = itemsize * heads * v_dim
    if placement.is_hopper and uses_hopper_kernels(config, qk_dim, v_dim):
        tiling = choose_tiling(qk_dim, v_dim, placement.sequence_length)
        memories = heads * itemsize * tiling.qk_dim * tiling.v_dim / tiling.chunk_size
        return hidden + memories + 24 * heads, memories
    chunk_size = min(config.chunk_size, placement.sequence_length)
    memories, weights = 4 * heads * qk_dim * v_dim / chunk_size, 4 * heads * chunk_size
    return hidden + 12 * heads, 3 * memories + 3 * weights


def uses_hopper_kernels(config: XLSTMConfig, qk_dim: int, v_dim: int) -> bool:
    """Tell whether the mLSTM uses the kernels for Hopper GPUs where they can run."""
    is_free = config.mlstm_backend in ("auto", "mosaic")
    return is_free and config.dtype == "bfloat16" and tiling_problem(qk_dim, v_dim) is None


def num_post_normed(config: XLSTMConfig, num_branches: int) -> int:
    """Count the features of branch outputs that the backward pass of post-norms reads."""
    return num_branches * config.embedding_dim if config.post_norm else 0


def _head_dims(config: XLSTMConfig) -> tuple[int, int]:
    """Return the sizes of a head's queries or keys and of its values."""
    return config.qk_dim // config.num_heads, config.v_dim // config.num_heads


def _create(config: XLSTMConfig) -> Block:
    return Block(config, MLSTMLayer, "mlstm", config.norm, config.ffn_hidden_dim, parent=None)


def _cost(config: XLSTMConfig, length: int) -> cost.BlockCost:
    dim, qk_dim, v_dim = config.embedding_dim, config.qk_dim, config.v_dim
    dense = functools.partial(cost.dense, length, use_bias=config.use_bias)
    return cost.total(
        [
            cost.vectors(dim, v_dim, dim),
            cost.vectors(*[dim] * (2 if config.post_norm else 0)),
            cost.vectors(*[qk_dim // config.num_heads] * (2 if config.qk_norm_scale else 0)),
            *(dense(dim, size) for size in (qk_dim, qk_dim, v_dim, v_dim)),
            _gate_cost(config, length),
            cell_cost(config, length, *_head_dims(config)),
            dense(v_dim, dim),
            cost.feed_forward(length, dim, config.ffn_hidden_dim, config.use_bias, has_norm=config.post_norm),
        ]
    )


def _gate_cost(config: XLSTMConfig, length: int) -> cost.BlockCost:
    """Return the cost of the gate projections.

    In a higher precision than their inputs, kernels and gradients of gates are sums of two arrays, and columns are
    padded.
    """
    columns = 2 * config.num_heads
    gates = cost.dense(length, config.embedding_dim, columns, use_bias=True)
    if (config.dtype, config.gate_dtype) != ("bfloat16", "float32"):
        return gates
    others = 0 if config.float8 else 2 * (config.qk_dim + config.v_dim)
    padded = 3 * columns + -(others + 3 * columns) % WIDTH
    forward, column = 2 * gates.forward, 2 * length * config.embedding_dim
    return gates._replace(forward=forward, backward=2 * column * padded, recomputed_full=forward)


def _activations(config: XLSTMConfig, placement: Placement) -> BlockActivations:
    itemsize, parts = jnp.dtype(config.dtype).itemsize, placement.model_axis_size
    dim, ffn_dim = config.embedding_dim, config.ffn_hidden_dim / parts
    qk_dim, v_dim = config.qk_dim / parts, config.v_dim / parts
    cell, temporaries = cell_memory(config, placement, *_head_dims(config))
    return BlockActivations(
        inputs=itemsize * dim,
        stream=itemsize * dim,
        projections=itemsize * (2 * qk_dim + 2 * v_dim + 2 * ffn_dim + num_post_normed(config, 2)),
        cell=cell,
        operands=itemsize * (v_dim + ffn_dim),
        rest=itemsize * 2 * dim,
        scanned=itemsize * (v_dim + 3 * ffn_dim),
        temporaries=temporaries,
    )


register_block_kind(
    BlockKind(
        name="mlstm",
        config_class=XLSTMConfig,
        create=_create,
        init_state=init_mlstm_state,
        cost=_cost,
        activations=_activations,
        describe_backend=lambda config: describe_cell(config, *_head_dims(config)),
        kernel=MLSTM_KERNEL,
        num_heads=lambda config: config.num_heads,
        head_sizes=lambda config: {"qk_dim": config.qk_dim, "v_dim": config.v_dim},
        fields=(
            *("qk_dim_factor", "v_dim_factor", "qk_norm", "qk_norm_scale", "gate_soft_cap", "input_gate_bias_init"),
            *FFN_FIELDS,
            *CELL_FIELDS,
        ),
        lay_out_for_decoding=concatenate_kernels,
    )
)
