"""The cost of a block as a sum of parts: projections, convolutions, cells, feed-forward layers.

FLOPs are those of matmuls, two for each multiply-add; everything else is negligible.
"""

from collections.abc import Iterable
from typing import NamedTuple


class BlockCost(NamedTuple):
    """What a block or a part of it costs; FLOPs are those of one sequence."""

    parameters: int = 0
    state_bytes: int = 0
    needed: int = 0
    """FLOPs of the forward pass as `Flops.model` counts them."""
    forward: int = 0
    backward: int = 0
    recomputed_full: int = 0
    """FLOPs that recompute what the backward pass needs, if nothing is saved."""
    recomputed_offload: int = 0
    """The same if the results of matmuls without batch dimensions are saved."""
    recomputed_dots: int = 0
    """The same if what the kernels of cells save is saved too."""
    recomputed_norms: int = 0
    """The same if the inputs of the last matmul of each branch are saved too."""


def total(parts: Iterable[BlockCost]) -> BlockCost:
    """Add up parts."""
    return BlockCost(*map(sum, zip(*parts, strict=True)))


def dense(length: int, num_inputs: int, num_outputs: int, *, use_bias: bool, is_last: bool = False) -> BlockCost:
    """Return the cost of a projection.

    The output of the last projection of a branch is added to the residual stream, so no gradient needs it again.
    """
    flops = 2 * length * num_inputs * num_outputs
    return BlockCost(
        parameters=num_inputs * num_outputs + (num_outputs if use_bias else 0),
        needed=flops,
        forward=flops,
        backward=2 * flops,
        recomputed_full=0 if is_last else flops,
    )


def block_diagonal(length: int, dim: int, block_size: int) -> BlockCost:
    """Return the cost of a projection with a block-diagonal kernel."""
    return batched(2 * length * dim * block_size)._replace(parameters=dim * block_size)


def batched(forward: int, *, backward: int | None = None, needed: int | None = None) -> BlockCost:
    """Return the cost of matmuls with batch dimensions: no policy saves their results, unless a kernel does.

    Args:
        forward: FLOPs of the forward pass.
        backward: FLOPs of the backward pass; twice the forward pass by default.
        needed: FLOPs that every implementation needs; those of the forward pass by default.
    """
    return BlockCost(
        needed=forward if needed is None else needed,
        forward=forward,
        backward=2 * forward if backward is None else backward,
        recomputed_full=forward,
        recomputed_offload=forward,
        recomputed_dots=forward,
        recomputed_norms=forward,
    )


def causal_conv(kernel_size: int, dim: int, itemsize: int) -> BlockCost:
    """Return the cost of a depthwise convolution: it has no matmul, as each channel is convolved by itself."""
    return BlockCost(parameters=(kernel_size + 1) * dim, state_bytes=(kernel_size - 1) * dim * itemsize)


def vectors(*sizes: int) -> BlockCost:
    """Return the cost of scales of norms and other parameters that are multiplied or added elementwise."""
    return BlockCost(parameters=sum(sizes))


def feed_forward(length: int, dim: int, hidden_dim: int, use_bias: bool, *, has_norm: bool = False) -> BlockCost:
    """Return the cost of a gated feed-forward layer; a norm of its outputs needs them again for its gradient."""
    return total(
        [
            *(dense(length, dim, hidden_dim, use_bias=use_bias) for _ in ("gate", "up")),
            dense(length, hidden_dim, dim, use_bias=use_bias, is_last=not has_norm),
        ]
    )
