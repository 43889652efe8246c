"""The first steps of two tiny runs give the curves that are kept in `tests/golden/curves`."""

import numpy as np
import pytest
from golden import curves

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", curves.MODELS)
def test_a_tiny_run_gives_its_golden_curves(name, tmp_path):
    """Other machines and optimisation levels of the compiler differ by 5e-7."""
    golden, found = curves.read_golden(name), curves.train(name, tmp_path)
    assert {metric: len(values) for metric, values in found.items()} == {
        "loss": 30,
        "grad_norm": 30,
        "validation_loss": 3,
    }
    for metric, values in golden.items():
        np.testing.assert_allclose(found[metric], values, rtol=1e-5, err_msg=metric)
