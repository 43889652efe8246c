"""Our sLSTM against the cell of the package `xlstm`, whose outputs and gradients are kept in tests/golden."""

import functools
from pathlib import Path

import numpy as np
import pytest
from kernels.slstm.public_cell import outputs_and_gradients
from tolerances import assert_close, assert_close_by_norm

GOLDEN = Path(__file__).parents[2] / "golden" / "slstm_cell.npz"


@functools.cache
def golden():
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("backend", ["reference", "recompute"])
@pytest.mark.parametrize("suffix", ["", "_from_zero"])
def test_outputs_states_and_gradients_are_those_of_the_public_cell(suffix, backend):
    peer = golden()
    arrays = {"input": peer["input"]} | {k.removeprefix("param/"): v for k, v in peer.items() if k.startswith("param/")}
    initial = peer["initial_state"] if not suffix else np.zeros_like(peer["initial_state"])
    outputs, last, gradients = outputs_and_gradients(arrays, initial, peer["projection"], num_heads=3, backend=backend)
    assert_close(outputs, peer[f"output{suffix}"])
    assert_close(last, peer[f"states{suffix}"][:, -1])
    expected = {name: peer[f"grad{suffix}/{name}"] for name in arrays}
    if suffix:
        del gradients["initial_state"]
    else:
        expected["initial_state"] = peer["grad/initial_state"][:3]
    assert_close_by_norm(gradients, expected, relative=5e-5)
