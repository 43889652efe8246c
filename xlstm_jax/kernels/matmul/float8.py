"""Matmuls in float8, with one scale per array.

    a . b = scale_a scale_b (round(a / scale_a) . round(b / scale_b))

Features and kernels are e4m3 (four exponent bits, three mantissa bits), gradients e5m2, as they need more range. The
scale is the smallest power of two that brings the largest magnitude of an array into the range, so scaling is exact,
and only the conversion to float8 rounds. Scales are computed for each array: there is no state from step to step.

XLA compiles each matmul to one on Hopper's tensor cores, with the scales and the transposes that it needs.
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
    """An array in float8, and the scale by which to multiply it."""

    numbers: Float[Array, "..."]
    scale: Float[Array, ""]


def scaled(x: Float[Array, "..."], dtype: DTypeLike) -> Scaled:
    """Quantise an array to float8; if any element is not finite, all become NaN."""
    top = float(jnp.finfo(dtype).max)
    # The quotient is in [0.5, 1) times a power of two; for an array of zeros, it is the smallest normal number.
    quotient = jnp.maximum(jnp.max(jnp.abs(x)).astype(jnp.float32) / top, jnp.finfo(jnp.float32).tiny)
    _, exponent = jnp.frexp(quotient)
    scale = jnp.where(jnp.isfinite(quotient), jnp.ldexp(jnp.float32(1), exponent), jnp.nan)
    return Scaled((x.astype(jnp.float32) / scale).astype(dtype), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def float8_products(
    x: Float[Array, "... i"], kernels: tuple[Float[Array, "i _"], ...], dtype: DTypeLike
) -> tuple[Float[Array, "... _"], ...]:
    """Multiply features by several kernels; this and the matmuls of the backward pass are in float8.

    Args:
        x: The features.
        kernels: The kernels.
        dtype: Precision of the results; they need at least the range of bfloat16.
    """
    outputs, _ = _forward(x, kernels, dtype)
    return outputs


def _forward(x, kernels, dtype):
    features = scaled(x, FEATURES)
    matmul = functools.partial(_matmul, "...i,io->...o", features, dtype=dtype)
    # Named, because a policy that saves matmuls would otherwise save the unscaled results.
    return tuple(keep(matmul(scaled(kernel, FEATURES))) for kernel in kernels), (features, kernels)


def _backward(dtype, residuals, gradients):
    """Compute the gradients with the output gradients concatenated, so that the sum over kernels is one matmul."""
    features, kernels = residuals
    dy = scaled(jnp.concatenate(gradients, axis=-1), GRADIENTS)
    kernel = scaled(jnp.concatenate(kernels, axis=-1), FEATURES)
    dx = _matmul("...o,io->...i", dy, kernel, dtype=dtype, precision="highest")
    dkernel = _matmul("...i,...o->io", features, dy, dtype=kernels[0].dtype, precision="highest")
    return dx, tuple(split_columns(dkernel, kernels))


float8_products.defvjp(_forward, _backward)


def _matmul(form: str, a: Scaled, b: Scaled, *, dtype: DTypeLike, precision: str | None = None) -> jax.Array:
    """Multiply two scaled arrays; the highest precision turns off Hopper's fast low-precision accumulation."""
    y = jnp.einsum(form, a.numbers, b.numbers, preferred_element_type=dtype, precision=precision)
    return y * (a.scale * b.scale).astype(dtype)
