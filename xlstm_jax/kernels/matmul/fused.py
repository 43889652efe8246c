"""Matmuls of the same features with several kernels, with a backward pass of two fused matmuls.

In the backward pass, the gradients of all outputs are concatenated, and so are the kernels: one matmul then gives the
gradient of the features, and another the gradients of all kernels.

With bfloat16 features, an output may still be float32. Then its kernel is split into two bfloat16 matrices, which have
16 of its 24 bits, and its gradient likewise: their matmuls run at full speed, without a float32 copy of the features.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

WIDTH = 64
"""The multiple to which columns are padded if there are small outputs, as tensor cores require."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def products(
    x: Float[Array, "... i"], kernels: tuple[Float[Array, "i _"], ...], dtypes: tuple[jnp.dtype, ...]
) -> tuple[Float[Array, "... _"], ...]:
    """Multiply features by several kernels.

    Args:
        x: The features.
        kernels: The kernels, all with the same precision.
        dtypes: The precision of each output: that of the features, or float32 if the features are bfloat16.
    """
    outputs, _ = _forward(x, kernels, dtypes)
    return outputs


def _forward(x, kernels, dtypes):
    same, finer = _by_precision(x.dtype, dtypes)
    outputs = {index: x @ kernels[index].astype(x.dtype) for index in same}
    if finer:
        halves = _halves(_concatenate_columns(kernels, finer))
        y = jnp.einsum("...i,io->...o", x, jnp.concatenate(halves, axis=-1), preferred_element_type=jnp.float32)
        whole, rest = jnp.split(y, 2, axis=-1)
        outputs |= zip(finer, split_columns(whole + rest, [kernels[index] for index in finer]), strict=True)
    return tuple(outputs[index] for index in range(len(kernels))), (x, kernels)


def _backward(dtypes, residuals, gradients):
    x, kernels = residuals
    same, finer = _by_precision(x.dtype, dtypes)
    dys, sides = [gradients[index] for index in same], [kernels[index].astype(x.dtype) for index in same]
    if finer:
        dy, dy_rest = _halves(_concatenate_columns(gradients, finer))
        side, side_rest = _halves(_concatenate_columns(kernels, finer))
        # The matmul of the two remainders is negligible in this precision.
        dys += [dy, dy_rest, dy]
        sides += [side, side, side_rest]
        missing = -sum(part.shape[-1] for part in sides) % WIDTH
        dys.append(jnp.zeros((*x.shape[:-1], missing), x.dtype))
        sides.append(jnp.zeros((x.shape[-1], missing), x.dtype))
    # Without the barrier, XLA would concatenate them again for each matmul.
    dy, kernel = lax.optimization_barrier([jnp.concatenate(parts, axis=-1) for parts in (dys, sides)])
    dkernel = jnp.einsum("...i,...o->io", x, dy, preferred_element_type=kernels[0].dtype)
    parts = split_columns(dkernel, sides)
    dkernels = dict(zip(same, parts, strict=False))
    if finer:
        whole, rest = parts[len(same) : len(same) + 2]
        dkernels |= zip(finer, split_columns(whole + rest, [kernels[index] for index in finer]), strict=True)
    return dy @ kernel.T, tuple(dkernels[index] for index in range(len(kernels)))


products.defvjp(_forward, _backward)


def _by_precision(dtype: jnp.dtype, dtypes: Sequence[jnp.dtype]) -> tuple[list[int], list[int]]:
    """Return the indices of the outputs in the precision of the features, and of those in a higher one."""
    same = [index for index, other in enumerate(dtypes) if other == dtype]
    return same, [index for index in range(len(dtypes)) if index not in same]


def _concatenate_columns(arrays: Sequence[jax.Array], indices: Sequence[int]) -> jax.Array:
    return jnp.concatenate([arrays[index] for index in indices], axis=-1)


def split_columns(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Split columns that were concatenated."""
    ends = np.cumsum([part.shape[-1] for part in like])
    return jnp.split(x, ends[:-1], axis=-1)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split a float32 array into two bfloat16 arrays whose sum approximates it."""
    coarse = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may remove a conversion back and forth
    return coarse.astype(jnp.bfloat16), (x - coarse).astype(jnp.bfloat16)
