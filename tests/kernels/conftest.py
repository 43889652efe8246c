"""Double precision for the tests of kernels."""

import jax
import pytest


@pytest.fixture
def float64():
    """Switch double precision on, and name it."""
    with jax.enable_x64(True):
        yield "float64"
