"""What a model costs: parameters, the bytes of its state and the FLOPs of its training step.

FLOPs are those of matmuls, two for each multiply-add; everything else is negligible. `model_cost` computes
them from a config alone, `count_flops` counts them in a traced function. The two agree exactly on the forms that run on
every device: `chunkwise` for the mLSTM, `recompute` for the sLSTM, `xla` for attention.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from xlstm_jax.models.blocks.cost import BlockCost, total
from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.language_model import LanguageModelConfig

UNCOUNTABLE = {
    "conv_general_dilated",
    "dot_product_attention_bwd",
    "dot_product_attention_fwd",
    "ffi_call",
    "pallas_call",
    "ragged_dot_general",
}
"""Primitives with matmuls that are no `dot_general`."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of a training step, or of one of its tokens."""

    model: int | float
    """What every implementation has to compute, forward and backward: the measure of model FLOPs utilisation. The
    backward pass counts twice the forward pass, the mLSTM one write and one read of its memory for each token, and
    attention the whole square of positions, also where causality or documents let a kernel skip pairs; padding and
    recomputation do not count. So the number is a property of the model and the length, not of the data, and a kernel
    that skips pairs raises the utilisation."""
    forward: int | float
    """What the forward pass executes."""
    backward: int | float
    """What the backward pass executes, less `recomputed`."""
    recomputed: int | float
    """What the backward pass executes to recompute activations: those that `remat` names, and the logits."""

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


def model_cost(config: LanguageModelConfig, *, sequence_length: int, batch_size: int = 1) -> Cost:
    """Compute the cost of a model and of a training step with its chunked loss, without a mesh.

    Args:
        config: The shape of the model. Its backends have no influence.
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
    blocks = total(block_kind(kind).cost(config, sequence_length) for kind in config.kinds)
    head = _embedding_and_head(config, num_tokens)
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
    """Count the FLOPs of the matmuls that a function executes, by tracing it.

    The body of a scan counts as often as it runs. Of the branches of a `cond`, the most expensive one counts. Inside
    a `shard_map`, the matmuls of one device count.

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
        raise ValueError("A while loop multiplies matrices, but how often it runs is unknown: use a scan.")
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


def _recomputed(config: LanguageModelConfig, blocks: BlockCost) -> int:
    remat = config.remat_of_blocks
    return 0 if remat == "none" else getattr(blocks, f"recomputed_{remat}")


def _embedding_and_head(config: LanguageModelConfig, num_tokens: int) -> BlockCost:
    """Return the cost of embedding and head for a whole batch.

    The loss pads the tokens of a batch to whole chunks. Logits that are kept are lost where the head is recomputed.
    """
    keeps_logits = config.keep_logits and "LMHead" not in config.parallel.remat
    padded = num_tokens + -num_tokens % min(config.loss_chunk_size, num_tokens)
    table = config.vocab_size * config.embedding_dim
    return BlockCost(
        parameters=(1 if config.tie_weights else 2) * table + config.embedding_dim,
        needed=2 * num_tokens * table,
        forward=2 * padded * table,
        backward=4 * padded * table,
        recomputed_full=0 if keeps_logits else 2 * padded * table,
    )
