"""Gates start with the biases of the published models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close

from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig

CONFIG = XLSTMConfig(vocab_size=24, embedding_dim=32, num_heads=4, num_blocks=3, scan_blocks=False)


def layers(block_kind):
    model = XLSTM(dataclasses.replace(CONFIG, block_kinds=block_kind))
    params = model.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    return [params["block_stack"][f"block_{index}"][block_kind.split("_")[0]] for index in range(CONFIG.num_blocks)]


@pytest.mark.parametrize("block_kind", ["mlstm", "mlstm_up"])
def test_forget_gates_of_an_mlstm_start_between_3_and_6(block_kind):
    for layer in layers(block_kind):
        assert_close(layer["fgate"]["bias"], np.linspace(3.0, 6.0, CONFIG.num_heads))
        assert np.all(np.asarray(layer["fgate"]["kernel"]) == 0)


def test_input_gates_of_an_mlstm_start_at_minus_10():
    assert [set(np.asarray(layer["igate"]["bias"]).tolist()) for layer in layers("mlstm")] == 3 * [{-10.0}]


def test_forget_gates_of_an_slstm_start_with_a_power_law_that_depends_on_the_block():
    """The bias of cell j of d in block l of L is -(-5 + 12 (j / (d - 1)) ** (0.3 + 1.3 l / (L - 1)))."""
    size = CONFIG.embedding_dim // CONFIG.num_heads
    for block, layer in enumerate(layers("slstm")):
        exponent = 0.3 + 1.3 * block / (CONFIG.num_blocks - 1)
        expected = [-(-5 + 12 * (cell / (size - 1)) ** exponent) for cell in range(size)]
        bias = np.asarray(layer["bias"])  # [heads, gates, cells]
        assert_close(bias[:, 1], np.tile(expected, (CONFIG.num_heads, 1)))
        assert np.all(np.delete(bias, 1, axis=1) == 0)
