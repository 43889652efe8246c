"""Our xLSTM equals that of transformers, both with its own blocks and with those it takes from the package `xlstm`."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conversion.loading import Converted

from xlstm_jax.conversion.xlstm import config_from_huggingface, huggingface_rules
from xlstm_jax.kernels.mlstm import MLSTMState
from xlstm_jax.models.xlstm import XLSTM

peers = pytest.importorskip("golden.peers", reason="compares with the packages of the extra 'parity'")
comparison = pytest.importorskip("parity.comparison")
torch = peers.torch

CONFIGS = {
    "small": {},
    "other sizes": {
        "num_hidden_layers": 3,
        "num_heads": 4,
        "qk_dim_factor": 1.0,
        "v_dim_factor": 0.5,
        "chunk_size": 16,
        "ffn_proj_factor": 2.667,
        "gate_soft_cap": 3.0,
        "output_logit_soft_cap": 5.0,
    },
}
of_configs = pytest.mark.parametrize("config", CONFIGS)
of_blocks = pytest.mark.parametrize("of_package", [False, True], ids=["own blocks", "blocks of the package"])


@functools.cache
def theirs(config, of_package):
    model = peers.hf_xlstm(of_package=of_package, **CONFIGS[config])
    peers.randomise(model, np.random.default_rng(21), norm_centre=1.0)
    return model.train()


@functools.cache
def ours(config):
    own = config_from_huggingface(theirs(config, False).config.to_dict())
    return Converted(XLSTM(own), huggingface_rules(own))


@functools.cache
def tokens():
    return peers.draw_tokens(np.random.default_rng(22), 64, 37)


@of_blocks
@of_configs
@pytest.mark.parametrize("length", [1, 16, 37])
def test_logits_and_gradients_are_theirs(config, of_package, length):
    model = theirs(config, of_package)

    def run(tokens):
        return model(tokens, use_cache=False).logits

    comparison.assert_logits_and_gradients_are_those_of(model, ours(config), run, tokens()[:, :length])


@of_blocks
@of_configs
@pytest.mark.parametrize("length", [1, 11])
def test_logits_states_and_gradients_from_a_state_are_theirs(config, of_package, length):
    model, own = theirs(config, of_package), ours(config)
    parameters = peers.parameters_of(model)
    cache = peers.empty_hf_cache(model)
    with torch.no_grad():
        model(tokens()[:, :13], cache_params=cache, use_cache=True)
    cells = {name: value.requires_grad_() for name, value in peers.cells_of(cache).items()}
    state = state_of(cells)

    arrays, following = comparison.arrays_of(parameters), jnp.asarray(tokens()[:, 13 : 13 + length].numpy())
    _, own_state = own.logits_and_state(arrays, jnp.asarray(tokens()[:, :13].numpy()))
    comparison.assert_same(named_cells(own_state), cells)

    with torch.no_grad():
        model(tokens()[:, 13 : 13 + length], cache_params=cache, use_cache=True)
    logits, last = own.logits_and_state(arrays, following, state)
    comparison.assert_same(named_cells(last), peers.cells_of(cache))

    cache.rnn_state = peers.FrozenCells(layers_of(cells))
    expected = model(tokens()[:, 13 : 13 + length], cache_params=cache, use_cache=True).logits
    comparison.assert_same({"logits": logits}, {"logits": expected})
    projection = peers.grid(np.random.default_rng(7), tuple(expected.shape), 1.0)
    gradients, dstate = own.gradients(arrays, state, following, projection.numpy())
    # The stabiliser is a choice of units and carries no gradient.
    inputs = parameters | {name: cell for name, cell in cells.items() if not name.endswith("m")}
    dcells = {name: value for name, value in named_cells(dstate).items() if not name.endswith("m")}
    comparison.assert_same(gradients | dcells, peers.gradients(expected, projection, inputs))


@of_blocks
def test_parameters_of_ours_work_in_their_model(of_package):
    model = peers.hf_xlstm(of_package=of_package)

    def run(tokens):
        return model(tokens, use_cache=False).logits

    comparison.assert_our_parameters_work_in(model, ours("small"), run, tokens()[:, :13])


def layers_of(cells):
    """Group named cells by layer, as their cache has them."""
    return {layer: tuple(cells[f"{layer}/{part}"] for part in "Cnm") for layer in range(len(cells) // 3)}


def state_of(cells):
    """Stack the cells of all layers as our state of scanned blocks."""
    arrays = comparison.arrays_of(cells)
    memory, normalizer, stabilizer = (
        jnp.stack([arrays[f"{layer}/{part}"] for layer in range(len(cells) // 3)]) for part in "Cnm"
    )
    return (MLSTMState(memory, normalizer, stabilizer[..., 0]),)


def named_cells(state):
    """Name the parts of our state as theirs."""
    (cell,) = state
    parts = {"C": cell.memory, "n": cell.normalizer, "m": cell.stabilizer[..., None]}
    return {f"{layer}/{name}": part[layer] for layer in range(len(cell.memory)) for name, part in parts.items()}
