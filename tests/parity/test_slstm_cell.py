"""Our sLSTM equals the vanilla cell of the package `xlstm`."""

import numpy as np
import pytest
from kernels.slstm.public_cell import outputs_and_gradients

peers = pytest.importorskip("golden.peers", reason="compares with the packages of the extra 'parity'")
comparison = pytest.importorskip("parity.comparison")


@pytest.mark.parametrize("backend", ["reference", "recompute"])
@pytest.mark.parametrize("from_zero", [False, True], ids=["from a state", "from zero"])
@pytest.mark.parametrize(("num_heads", "length"), [(1, 1), (2, 33), (4, 12)])
def test_outputs_states_and_gradients_are_theirs(num_heads, length, from_zero, backend):
    cell = peers.slstm_cell(hidden_size=16, num_heads=num_heads)
    generator = np.random.default_rng(51)
    peers.randomise(cell, generator, norm_centre=0.0)
    drawn = peers.slstm_arguments(cell, generator, length)
    state = peers.torch.zeros_like(drawn["initial_state"]) if from_zero else drawn["initial_state"]
    inputs = peers.parameters_of(cell) | {"input": drawn["input"]}
    expected, last = cell(drawn["input"], None if from_zero else state)
    expected_gradients = peers.gradients(
        expected, drawn["projection"], inputs | ({} if from_zero else {"initial_state": state})
    )

    outputs, own_last, gradients = outputs_and_gradients(
        comparison.arrays_of(inputs),
        state.detach().numpy(),
        drawn["projection"].numpy(),
        num_heads=num_heads,
        backend=backend,
    )
    if from_zero:
        del gradients["initial_state"]
    else:
        expected_gradients["initial_state"] = expected_gradients["initial_state"][:3]
    comparison.assert_same({"outputs": outputs, "last": own_last}, {"outputs": expected, "last": last})
    comparison.assert_same(gradients, expected_gradients)
