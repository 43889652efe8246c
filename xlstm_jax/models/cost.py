"""What a model costs: parameters, the bytes of its state and the FLOPs of its training step.

FLOPs are those of matrix products, two for each multiply-add; all else is little beside them. `model_cost` computes
them from a config alone, `count_flops` counts them in a traced function. The two agree exactly on the forms that run on
every device: `chunkwise` for the mLSTM, `recompute` for the sLSTM, `xla` for attention.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from xlstm_jax.kernels.matmul.fused import WIDTH
from xlstm_jax.kernels.mlstm.state import state_dtype
from xlstm_jax.models.llama.config import LlamaConfig
from xlstm_jax.models.xlstm.config import XLSTMConfig

COUNTER_ITEMSIZE = 4
"""Bytes of a counter in Llama's cache."""

UNCOUNTABLE = {
    "conv_general_dilated",
    "dot_product_attention_bwd",
    "dot_product_attention_fwd",
    "ffi_call",
    "pallas_call",
    "ragged_dot_general",
}
"""Primitives with products that are no `dot_general`."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a training step, or of one of its tokens."""

    model: int | float
    """What every implementation has to compute, forward and backward: the measure of model FLOPs utilisation. The
    backward pass counts twice the forward pass, the mLSTM one write and one read of its memory for each token, and
    attention the whole square of positions, also where causality or documents let a kernel skip pairs; padding and what
    is computed again do not count. So the number is a property of the model and the length, not of the data, and a
    kernel that skips pairs raises the utilisation."""
    forward: int | float
    """What the forward pass executes."""
    backward: int | float
    """What the backward pass executes, less `recomputed`."""
    recomputed: int | float
    """What the backward pass executes to have activations again: those that `remat` names, and the logits."""

    @property
    def executed(self) -> int | float:
        """All that a training step executes."""
        return self.forward + self.backward + self.recomputed


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a model costs."""

    parameters: int
    """The number of parameters."""
    state_bytes: int
    """The size of the state of one sequence."""
    num_tokens: int
    """The number of tokens in a batch."""
    flops: Flops
    """FLOPs of a batch."""

    @property
    def flops_per_token(self) -> Flops:
        """FLOPs of a batch over its tokens."""
        return Flops(**{name: flops / self.num_tokens for name, flops in dataclasses.asdict(self.flops).items()})


def model_cost(config: XLSTMConfig | LlamaConfig, *, sequence_length: int, batch_size: int = 1) -> Cost:
    """Compute the cost of a model and of a training step with its chunked loss, without a mesh.

    Args:
        config: The shape of the model. Its backends are not looked at.
        sequence_length: The number of tokens in a sequence, at least 2: a single one is a step of decoding.
        batch_size: The number of sequences that go through the model at once.

    Returns:
        The cost.
    """
    if sequence_length < 2 or batch_size < 1:
        raise ValueError(
            f"sequence_length is {sequence_length} and batch_size {batch_size}, but training needs at least two tokens "
            "in a sequence and one sequence in a batch."
        )
    num_tokens = batch_size * sequence_length
    blocks, head = _blocks(config, sequence_length), _embedding_and_head(config, num_tokens)
    return Cost(
        parameters=blocks.parameters + head.parameters,
        state_bytes=blocks.state_bytes,
        num_tokens=num_tokens,
        flops=Flops(
            model=3 * (batch_size * blocks.needed + head.needed),
            forward=batch_size * blocks.forward + head.forward,
            backward=batch_size * blocks.backward + head.backward,
            recomputed=batch_size * _recomputed(config, blocks) + head.recomputed_full,
        ),
    )


def count_flops(function: Callable, *args: Any) -> int:
    """Count the FLOPs of the matrix products that a function executes, by tracing it.

    The body of a scan counts as often as it runs. Of the branches of a `cond`, the dearest one counts. Inside a
    `shard_map`, the products of one device count.

    Args:
        function: The function.
        *args: Its arguments, or their shapes.

    Returns:
        Two FLOPs for each multiply-add.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Jaxpr) -> int:
    return sum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: JaxprEqn) -> int:
    name, inner = equation.primitive.name, [_count(jaxpr) for jaxpr in _inner_jaxprs(equation)]
    if name in UNCOUNTABLE:
        raise ValueError(f"The FLOPs of {name!r} cannot be counted: pick a backend that is written in plain JAX.")
    if name == "while" and any(inner):
        raise ValueError("A while loop multiplies matrices, but nobody knows how often it runs: use a scan.")
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, result = _shape(equation.invars[0]), _shape(equation.outvars[0])
        return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)
    if name == "cond":
        return max(inner)
    return equation.params["length"] * sum(inner) if name == "scan" else sum(inner)


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    leaves = [leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf for leaf in jax.tree.leaves(equation.params)]
    return [leaf for leaf in leaves if isinstance(leaf, Jaxpr)]


class _Part(NamedTuple):
    """What a part of a model costs; FLOPs of one sequence in a block, of the whole batch in the head."""

    parameters: int = 0
    state_bytes: int = 0
    needed: int = 0
    """FLOPs of the forward pass as `Flops.model` counts them."""
    forward: int = 0
    backward: int = 0
    recomputed_full: int = 0
    """FLOPs to compute again what the backward pass needs, if nothing is kept."""
    recomputed_offload: int = 0
    """The same if the results of products without batch dimensions are kept."""
    recomputed_dots: int = 0
    """The same if what the kernels of cells keep is kept too."""
    recomputed_norms: int = 0
    """The same if what the last products of branches multiply is kept too."""


def _total(parts: Iterable[_Part]) -> _Part:
    return _Part(*map(sum, zip(*parts, strict=True)))


def _recomputed(config: XLSTMConfig | LlamaConfig, blocks: _Part) -> int:
    remat = "full" if config.remat == "none" and "Block" in config.parallel.remat else config.remat
    return 0 if remat == "none" else getattr(blocks, f"recomputed_{remat}")


def _embedding_and_head(config: XLSTMConfig | LlamaConfig, num_tokens: int) -> _Part:
    """The loss pads the tokens of a batch to whole chunks; kept logits are lost where the head is computed again."""
    keeps_logits = config.keep_logits and "LMHead" not in config.parallel.remat
    padded = num_tokens + -num_tokens % min(config.loss_chunk_size, num_tokens)
    table = config.vocab_size * config.embedding_dim
    return _Part(
        parameters=(1 if config.tie_weights else 2) * table + config.embedding_dim,
        needed=2 * num_tokens * table,
        forward=2 * padded * table,
        backward=4 * padded * table,
        recomputed_full=0 if keeps_logits else 2 * padded * table,
    )


def _blocks(config: XLSTMConfig | LlamaConfig, length: int) -> _Part:
    if isinstance(config, LlamaConfig):
        return _total([_llama_block(config, length)] * config.num_blocks)
    block = {
        "mlstm": _mlstm_block,
        "mlstm_up": _mlstm_up_block,
        "slstm": _slstm_block,
    }
    return _total(block[kind](config, length) for kind in config.kinds)


def _mlstm_block(config: XLSTMConfig, length: int) -> _Part:
    dim, qk_dim, v_dim, num_heads = config.embedding_dim, config.qk_dim, config.v_dim, config.num_heads
    dense = functools.partial(_dense, length, use_bias=config.use_bias)
    return _total(
        [
            _vectors(dim, v_dim, dim),
            _vectors(*[dim] * (2 if config.post_norm else 0)),
            _vectors(*[qk_dim // num_heads] * (2 if config.qk_norm_scale else 0)),
            *(dense(dim, size) for size in (qk_dim, qk_dim, v_dim, v_dim)),
            _mlstm_gates(config, length),
            _mlstm_cell(config, length, qk_dim // num_heads, v_dim // num_heads),
            dense(v_dim, dim),
            _feed_forward(length, dim, config.ffn_hidden_dim, config.use_bias, has_norm=config.post_norm),
        ]
    )


def _mlstm_up_block(config: XLSTMConfig, length: int) -> _Part:
    dim, inner_dim, num_heads = config.embedding_dim, config.inner_dim, config.num_heads
    dense = functools.partial(_dense, length, use_bias=config.use_bias)
    return _total(
        [
            _vectors(dim, inner_dim, inner_dim),
            _vectors(*[dim] * (1 if config.post_norm else 0)),
            *(dense(dim, inner_dim) for _ in ("up", "gate")),
            _conv(config, inner_dim),
            *(_block_diagonal(length, inner_dim, config.qkv_block_size) for _ in "qkv"),
            *(_dense(length, 3 * inner_dim, num_heads, use_bias=True) for _ in ("igate", "fgate")),
            _mlstm_cell(config, length, inner_dim // num_heads, inner_dim // num_heads),
            dense(inner_dim, dim, is_last=not config.post_norm),
        ]
    )


def _slstm_block(config: XLSTMConfig, length: int) -> _Part:
    dim, head_dim = config.embedding_dim, config.embedding_dim // config.num_heads
    return _total(
        [
            _vectors(dim, 4 * dim, dim, dim),
            _vectors(*[dim] * (2 if config.post_norm else 0)),
            _conv(config, dim),
            *(_block_diagonal(length, dim, head_dim) for _ in "ifzo"),
            _slstm_cell(length, dim, head_dim, state_dtype(config.gate_dtype).itemsize),
            _feed_forward(length, dim, config.slstm_ffn_dim, config.use_bias, has_norm=config.post_norm),
        ]
    )


def _llama_block(config: LlamaConfig, length: int) -> _Part:
    dim, kv_dim = config.embedding_dim, config.kv_heads * config.head_dim
    dense = functools.partial(_dense, length, use_bias=config.use_bias)
    cache = 2 * config.max_state_length * kv_dim * jnp.dtype(config.dtype).itemsize + 3 * COUNTER_ITEMSIZE
    return _total(
        [
            _vectors(dim, *[config.head_dim] * (2 if config.qk_norm else 0), dim),
            *(dense(dim, size) for size in (dim, kv_dim, kv_dim)),
            # Weights of attention are computed again for their own gradients; what they read may be kept.
            _batched(2 * 2 * length**2 * dim)._replace(recomputed_norms=2 * length**2 * dim, state_bytes=cache),
            dense(dim, dim),
            _feed_forward(length, dim, config.ffn_hidden_dim, config.use_bias),
        ]
    )


def _mlstm_gates(config: XLSTMConfig, length: int) -> _Part:
    """Finer than their inputs, kernels and gradients of gates are sums of two arrays, and columns are filled up."""
    columns = 2 * config.num_heads
    gates = _dense(length, config.embedding_dim, columns, use_bias=True)
    if (config.dtype, config.gate_dtype) != ("bfloat16", "float32"):
        return gates
    beside = 0 if config.float8 else 2 * (config.qk_dim + config.v_dim)
    filled = 3 * columns + -(beside + 3 * columns) % WIDTH
    forward, column = 2 * gates.forward, 2 * length * config.embedding_dim
    return gates._replace(forward=forward, backward=2 * column * filled, recomputed_full=forward)


def _mlstm_cell(config: XLSTMConfig, length: int, qk_dim: int, v_dim: int) -> _Part:
    chunk_size = min(config.chunk_size, length)
    forward, backward = _mlstm_products(chunk_size, qk_dim, v_dim)
    padded = length + -length % chunk_size
    return _batched(
        2 * config.num_heads * padded * forward,
        backward=2 * config.num_heads * padded * backward,
        needed=2 * config.num_heads * length * 2 * qk_dim * v_dim,
    )._replace(
        recomputed_dots=0,
        recomputed_norms=0,
        state_bytes=state_dtype(config.dtype).itemsize * config.num_heads * (qk_dim * v_dim + qk_dim + 1),
    )


def _mlstm_products(chunk_size: int, qk_dim: int, v_dim: int) -> tuple[int, int]:
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


def _slstm_cell(length: int, dim: int, head_dim: int, itemsize: int) -> _Part:
    """The backward pass has three products: pre-activations again, the hidden state's gradient and the kernel's."""
    recurrent = 4 * dim * head_dim
    return _batched(2 * length * recurrent, backward=3 * 2 * length * recurrent)._replace(
        recomputed_dots=0, recomputed_norms=0, parameters=recurrent, state_bytes=4 * dim * itemsize
    )


def _feed_forward(length: int, dim: int, hidden_dim: int, use_bias: bool, *, has_norm: bool = False) -> _Part:
    """A norm of the results needs them again for its gradient."""
    return _total(
        [
            *(_dense(length, dim, hidden_dim, use_bias=use_bias) for _ in ("gate", "up")),
            _dense(length, hidden_dim, dim, use_bias=use_bias, is_last=not has_norm),
        ]
    )


def _dense(length: int, num_inputs: int, num_outputs: int, *, use_bias: bool, is_last: bool = False) -> _Part:
    """The result of the last projection of a block goes into a sum, so no gradient needs it again."""
    flops = 2 * length * num_inputs * num_outputs
    return _Part(
        parameters=num_inputs * num_outputs + (num_outputs if use_bias else 0),
        needed=flops,
        forward=flops,
        backward=2 * flops,
        recomputed_full=0 if is_last else flops,
    )


def _block_diagonal(length: int, dim: int, block_size: int) -> _Part:
    return _batched(2 * length * dim * block_size)._replace(parameters=dim * block_size)


def _batched(forward: int, *, backward: int | None = None, needed: int | None = None) -> _Part:
    """Products with batch dimensions: no policy keeps their results, unless they belong to a kernel that keeps them."""
    return _Part(
        needed=forward if needed is None else needed,
        forward=forward,
        backward=2 * forward if backward is None else backward,
        recomputed_full=forward,
        recomputed_offload=forward,
        recomputed_dots=forward,
        recomputed_norms=forward,
    )


def _conv(config: XLSTMConfig, dim: int) -> _Part:
    """A convolution multiplies no matrices: each channel is by itself."""
    return _Part(
        parameters=(config.conv_kernel_size + 1) * dim,
        state_bytes=(config.conv_kernel_size - 1) * dim * jnp.dtype(config.dtype).itemsize,
    )


def _vectors(*sizes: int) -> _Part:
    """Scales of norms, and what else is multiplied or added element by element."""
    return _Part(parameters=sum(sizes))
