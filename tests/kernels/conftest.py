"""Precision and shape checks for the tests of kernels."""

import jax
import jaxtyping
import pytest


@pytest.fixture
def float64():
    """Switch double precision on, and name it."""
    with jax.enable_x64(True):
        yield "float64"


@pytest.fixture
def unchecked_shapes():
    """Switch the checks of annotations off, to reach the package's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
