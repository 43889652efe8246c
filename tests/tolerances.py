"""How close is equal: one table for all tests, and the comparison that reads it."""

import jax
import jax.numpy as jnp
import numpy as np

RELATIVE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}
"""Largest difference of a leaf, as a share of the largest magnitude in the expected leaf."""


def assert_close(actual, expected, *, dtype=jnp.float32):
    """Assert that two trees have one structure and leaves that agree to the precision of `dtype`."""
    actual_leaves, actual_tree = jax.tree.flatten(actual)
    expected_leaves, expected_tree = jax.tree.flatten(expected)
    assert actual_tree == expected_tree, f"{actual_tree} is not {expected_tree}"
    relative = RELATIVE[jnp.dtype(dtype).name]
    for index, (a, e) in enumerate(zip(actual_leaves, expected_leaves, strict=True)):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, f"leaf {index}: shape {a.shape} is not {e.shape}"
        scale = np.max(np.abs(e), initial=0.0)
        np.testing.assert_allclose(a, e, rtol=relative, atol=relative * scale, err_msg=f"leaf {index}")


def assert_close_by_norm(actual, expected, *, relative: float, at_least: float = 0.0):
    """Assert that each named array differs little, measured by norms, beside the expected one or beside `at_least`."""
    assert actual.keys() == expected.keys()
    for name, e in expected.items():
        e = np.asarray(e, np.float64)
        error = np.linalg.norm(np.asarray(actual[name], np.float64) - e)
        scale = max(np.linalg.norm(e), at_least)
        assert error <= relative * scale, f"{name}: off by {error:.2e} of {np.linalg.norm(e):.2e}"
