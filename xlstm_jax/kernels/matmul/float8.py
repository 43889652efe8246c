"""Products of numbers with eight bits, and one scale for each array of them.

    a . b = scale_a scale_b (round(a / scale_a) . round(b / scale_b))

Features and kernels have four bits for the exponent and three for the mantissa, gradients five and two, as they spread
over more magnitudes. A scale is the power of two that takes the largest number of an array just into the range, so that
nothing but these roundings is inexact. It is found anew for each array: nothing is carried from step to step.

XLA makes a product of Hopper's tensor cores of it, with the scales in it and with the transposes that those need.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from xlstm_jax.kernels.matmul.fused import split_columns
from xlstm_jax.kernels.shared.remat_names import keep

FEATURES, GRADIENTS = jnp.float8_e4m3fn, jnp.float8_e5m2


class Scaled(NamedTuple):
    """An array of eight bits a number, times a scale."""

    numbers: Float[Array, "..."]
    scale: Float[Array, ""]


def scaled(x: Float[Array, "..."], dtype: DTypeLike) -> Scaled:
    """Round an array to float8. One that is not finite makes all of it NaN."""
    top = float(jnp.finfo(dtype).max)
    # The quotient is in [0.5, 1) times a power of two; where all is zero, that is the smallest normal number.
    quotient = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32) / top, jnp.finfo(jnp.float32).tiny)
    _, exponent = jnp.frexp(quotient)
    scale = jnp.where(jnp.isfinite(quotient), jnp.ldexp(jnp.float32(1), exponent), jnp.nan)
    return Scaled((x.astype(jnp.float32) / scale).astype(dtype), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def float8_products(
    x: Float[Array, "... i"], kernels: tuple[Float[Array, "i _"], ...], dtype: DTypeLike
) -> tuple[Float[Array, "... _"], ...]:
    """Multiply features by each of some kernels, in float8, as are the products of the backward pass.

    Args:
        x: The features.
        kernels: The kernels.
        dtype: Precision of the results; at least that of bfloat16, whose range they need.
    """
    outputs, _ = _forward(x, kernels, dtype)
    return outputs


def _forward(x, kernels, dtype):
    features = scaled(x, FEATURES)
    product = functools.partial(_product, "...i,io->...o", features, dtype=dtype)
    # Named, as a policy that keeps products would keep those without their scale.
    return tuple(keep(product(scaled(kernel, FEATURES))) for kernel in kernels), (features, kernels)


def _backward(dtype, residuals, gradients):
    """Lay the gradients of all outputs side by side: sums over kernels are then those within a product."""
    features, kernels = residuals
    dy = scaled(jnp.concatenate(gradients, axis=-1), GRADIENTS)
    kernel = scaled(jnp.concatenate(kernels, axis=-1), FEATURES)
    dx = _product("...o,io->...i", dy, kernel, dtype=dtype, precision="highest")
    dkernel = _product("...i,...o->io", features, dy, dtype=kernels[0].dtype, precision="highest")
    return dx, tuple(split_columns(dkernel, kernels))


float8_products.defvjp(_forward, _backward)


def _product(form: str, a: Scaled, b: Scaled, *, dtype: DTypeLike, precision: str | None = None) -> jax.Array:
    """Multiply two scaled arrays; the highest precision does without the short sums of Hopper's fast accumulation."""
    y = jnp.einsum(form, a.numbers, b.numbers, preferred_element_type=dtype, precision=precision)
    return y * (a.scale * b.scale).astype(dtype)
