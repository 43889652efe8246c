"""Products of the same features with several kernels, in the precision of the features and in a finer one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.kernels.matmul.fused import products

WIDTHS = 5, 3, 8, 2
MIXED = tuple(jnp.dtype(x) for x in ("bfloat16", "float32", "bfloat16", "float32"))


def drawn(dtype, dtypes):
    """Draw features, kernels in float32, and gradients."""
    keys = iter(jax.random.split(jax.random.key(0), 9))
    x = jax.random.normal(next(keys), (2, 40, 96), dtype)
    kernels = tuple(jax.random.normal(next(keys), (96, n)) for n in WIDTHS)
    gradients = tuple(jax.random.normal(next(keys), (2, 40, n), d) for n, d in zip(WIDTHS, dtypes, strict=True))
    return x, kernels, gradients


@jax.jit(static_argnums=3)
def computed(x, kernels, gradients, dtypes):
    outputs, backward = jax.vjp(lambda x, kernels: products(x, kernels, dtypes), x, kernels)
    return outputs, *backward(gradients)


def exact(x, kernels, gradients):
    """Compute the same in float64."""
    x, *rest = (np.asarray(y, np.float64) for y in (x, *kernels, *gradients))
    kernels, gradients = rest[: len(WIDTHS)], rest[len(WIDTHS) :]
    dx = sum(dy @ kernel.T for dy, kernel in zip(gradients, kernels, strict=True))
    return [x @ kernel for kernel in kernels], dx, [np.einsum("bsi,bso->io", x, dy) for dy in gradients]


def error(actual, expected):
    return np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("dtypes", [(jnp.dtype("float32"),) * 4, MIXED], ids=["one precision", "mixed"])
def test_outputs_and_gradients_have_the_precision_that_is_asked_for(dtypes):
    arrays = drawn(dtypes[0], dtypes)
    (outputs, dx, dkernels), expected = computed(*arrays, dtypes), exact(*arrays)
    limits = {jnp.dtype("bfloat16"): 5e-3, jnp.dtype("float32"): 1e-5}
    for y, y_exact, dtype in zip(outputs, expected[0], dtypes, strict=True):
        assert y.dtype == dtype
        assert error(y, y_exact) < limits[dtype]
    assert dx.dtype == dtypes[0]
    assert error(dx, expected[1]) < limits[dtypes[0]]
    for dkernel, dkernel_exact in zip(dkernels, expected[2], strict=True):
        assert error(dkernel, dkernel_exact) < 1e-5


def test_a_finer_gradient_reaches_the_features_with_one_rounding():
    x, kernels, gradients = drawn("bfloat16", MIXED)
    only_fine = tuple(dy if dy.dtype == jnp.float32 else jnp.zeros_like(dy) for dy in gradients)
    _, dx, _ = computed(x, kernels, only_fine, MIXED)
    # Nothing but the rounding of the result itself, which is 1.7e-3 of it.
    assert error(dx, exact(x, kernels, only_fine)[1]) < 2e-3


@pytest.mark.parametrize("dtypes", [(jnp.dtype("float32"),) * 4, MIXED], ids=["one precision", "mixed"])
def test_the_gradient_of_features_is_one_product(dtypes):
    x, kernels, gradients = drawn(dtypes[0], dtypes)
    backward = jax.vjp(lambda x, kernels: products(x, kernels, dtypes), x, kernels)[1]
    assert str(jax.make_jaxpr(backward)(gradients)).count("dot_general") == 2  # and one of all kernels
