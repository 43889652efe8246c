"""Running sums and maxima against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.kernels.mlstm.scans import scan

LENGTHS = [1, 5, 16, 17, 256, 300]
NUMPY = {"sum": np.add, "max": np.maximum}


def expected(x, operation, documents, reverse):
    """Accumulate each document by itself, row by row."""
    result = np.empty_like(x)
    step = -1 if reverse else 1
    for row in np.ndindex(x.shape[:-1]):
        for document in np.unique(documents[row]):
            places = np.flatnonzero(documents[row] == document)[::step]
            result[(*row, places)] = NUMPY[operation].accumulate(x[(*row, places)])
    return result


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("operation", ["sum", "max"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_scan_accumulates_all_positions(length, operation, reverse, unroll):
    x = np.random.default_rng(0).normal(size=(2, 3, length)).astype(np.float32)
    together = np.zeros((2, 3, length), int)
    actual = scan(jnp.asarray(x), operation, reverse=reverse, unroll=unroll)
    np.testing.assert_allclose(actual, expected(x, operation, together, reverse), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("operation", ["sum", "max"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_scan_begins_anew_in_each_document(length, operation, reverse, unroll):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(2, 3, length)).astype(np.float32)
    documents = np.cumsum(generator.random((2, 1, length)) < 0.1, axis=-1)
    actual = scan(jnp.asarray(x), operation, jnp.asarray(documents), reverse=reverse, unroll=unroll)
    everywhere = np.broadcast_to(documents, x.shape)
    np.testing.assert_allclose(actual, expected(x, operation, everywhere, reverse), rtol=1e-5, atol=1e-5)
