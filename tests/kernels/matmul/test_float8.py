"""Products in float8."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xlstm_jax.kernels.matmul.float8 import FEATURES, GRADIENTS, float8_products, scaled


def rounded(x, dtype):
    """Round to float8 and back, by NumPy and by another way to the scale."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max() / float(ml_dtypes.finfo(dtype).max)))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def drawn(shape, seed, size=1.0):
    """Draw numbers of many magnitudes."""
    normal, exponents = jax.random.normal(jax.random.key(seed), (2, *shape))
    return size * normal * jnp.exp2(3 * exponents)


@pytest.mark.parametrize("dtype", [FEATURES, GRADIENTS])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_largest_number_is_just_in_the_range(dtype, size):
    x = drawn((100,), 0, size)
    numbers, scale = scaled(x, dtype)
    largest, top = np.abs(np.asarray(numbers, np.float32)).max(), float(ml_dtypes.finfo(dtype).max)
    assert top / 2 <= largest <= top
    np.testing.assert_array_equal(np.asarray(numbers, np.float64) * np.float64(scale), rounded(x, dtype))


def test_zeros_stay_zeros():
    numbers, scale = scaled(jnp.zeros(3), FEATURES)
    assert not np.asarray(numbers, np.float32).any()
    assert np.isfinite(scale)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(bad):
    x, kernel = jnp.ones((4, 8)).at[1, 2].set(bad), jnp.ones((8, 3))
    (y,) = float8_products(x, (kernel,), jnp.float32)
    assert np.isnan(y).all()


def test_outputs_and_gradients_are_the_products_of_rounded_numbers():
    x, kernels = drawn((2, 7, 32), 0), (drawn((32, 5), 1), drawn((32, 16), 2, 10.0))
    gradients = drawn((2, 7, 5), 3, 0.01), drawn((2, 7, 16), 4, 0.01)
    outputs, backward = jax.vjp(lambda x, kernels: float8_products(x, kernels, jnp.float32), x, kernels)
    dx, dkernels = backward(gradients)
    x8, dy8 = rounded(x, FEATURES), rounded(np.concatenate(gradients, axis=-1), GRADIENTS)
    kernel8 = rounded(np.concatenate(kernels, axis=-1), FEATURES)

    def assert_equal(actual, expected):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())

    for y, kernel in zip(outputs, kernels, strict=True):
        assert_equal(y, x8 @ rounded(kernel, FEATURES))
    assert_equal(dx, dy8 @ kernel8.T)
    assert_equal(np.concatenate(dkernels, axis=-1), np.einsum("bsi,bso->io", x8, dy8))


def test_results_have_the_precision_that_is_asked_for():
    x, kernel = drawn((6, 32), 0).astype(jnp.bfloat16), drawn((32, 5), 1)
    (y,), backward = jax.vjp(lambda x, kernel: float8_products(x, (kernel,), jnp.bfloat16), x, kernel)
    dx, dkernel = backward((y,))
    assert (y.dtype, dx.dtype, dkernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
