"""Products of the same features with several kernels, whose gradient is one product, not a sum of many.

Backwards, the gradients of all outputs lie side by side, and so do the kernels: one product then gives the gradient of
the features, and another those of all kernels.

Where features are bfloat16, an output may be float32 nevertheless. Its kernel is then the sum of two matrices in
bfloat16, which have 16 of its 24 bits, and so is its gradient: products with them are as fast as any, features are read
as they are, and there is no copy of them in float32.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

WIDTH = 64
"""What columns are filled up to, where some are those of small outputs: tensor cores want such numbers."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def products(
    x: Float[Array, "... i"], kernels: tuple[Float[Array, "i _"], ...], dtypes: tuple[jnp.dtype, ...]
) -> tuple[Float[Array, "... _"], ...]:
    """Multiply features by each of some kernels.

    Args:
        x: The features.
        kernels: The kernels, all of one precision.
        dtypes: The precision of each output: that of the features, or float32 for features in bfloat16.
    """
    outputs, _ = _forward(x, kernels, dtypes)
    return outputs


def _forward(x, kernels, dtypes):
    same, finer = _by_precision(x.dtype, dtypes)
    outputs = {index: x @ kernels[index].astype(x.dtype) for index in same}
    if finer:
        halves = _halves(_side_by_side(kernels, finer))
        y = jnp.einsum("...i,io->...o", x, jnp.concatenate(halves, axis=-1), preferred_element_type=jnp.float32)
        whole, rest = jnp.split(y, 2, axis=-1)
        outputs |= zip(finer, split_columns(whole + rest, [kernels[index] for index in finer]), strict=True)
    return tuple(outputs[index] for index in range(len(kernels))), (x, kernels)


def _backward(dtypes, residuals, gradients):
    x, kernels = residuals
    same, finer = _by_precision(x.dtype, dtypes)
    dys, sides = [gradients[index] for index in same], [kernels[index].astype(x.dtype) for index in same]
    if finer:
        dy, dy_rest = _halves(_side_by_side(gradients, finer))
        side, side_rest = _halves(_side_by_side(kernels, finer))
        # The product of both rests would be too small to be seen.
        dys += [dy, dy_rest, dy]
        sides += [side, side, side_rest]
        missing = -sum(part.shape[-1] for part in sides) % WIDTH
        dys.append(jnp.zeros((*x.shape[:-1], missing), x.dtype))
        sides.append(jnp.zeros((x.shape[-1], missing), x.dtype))
    # Stored, as XLA would otherwise put them together once more for each product.
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
    """Return which outputs have the precision of the features, and which are finer."""
    same = [index for index, other in enumerate(dtypes) if other == dtype]
    return same, [index for index in range(len(dtypes)) if index not in same]


def _side_by_side(arrays: Sequence[jax.Array], indices: Sequence[int]) -> jax.Array:
    return jnp.concatenate([arrays[index] for index in indices], axis=-1)


def split_columns(x: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Take columns apart that were laid side by side."""
    ends = np.cumsum([part.shape[-1] for part in like])
    return jnp.split(x, ends[:-1], axis=-1)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two arrays in bfloat16 whose sum is nearly an array in float32."""
    coarse = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may leave out a conversion there and back
    return coarse.astype(jnp.bfloat16), (x - coarse).astype(jnp.bfloat16)
