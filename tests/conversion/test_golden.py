"""Our models with the parameters of public implementations give their logits, states and gradients."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conversion.loading import Converted, params_of, shapes_of, state_dict_of
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.conversion import llama, xlstm
from xlstm_jax.conversion.rules import to_ours
from xlstm_jax.models.llama import LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden"
PAPER = (XLSTM, xlstm.config_from_paper, xlstm.paper_rules, {"chunk_size": 8})
PEERS = {
    "hf_xlstm": (XLSTM, xlstm.config_from_huggingface, xlstm.huggingface_rules, {"chunk_size": 8}),
    "xlstm_mlstm_block": PAPER,
    "xlstm_slstm_block": (*PAPER[:3], {}),
    "xlstm_mixed": PAPER,
    "hf_llama": (LlamaTransformer, llama.config_from_huggingface, llama.huggingface_rules, {"max_state_length": 19}),
}
of_peers = pytest.mark.parametrize("name", PEERS)


@functools.cache
def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    parameters, gradients = (
        {k.removeprefix(p): v for k, v in arrays.items() if k.startswith(p)} for p in ("param/", "grad/")
    )
    model_class, make_config, make_rules, changes = PEERS[name]
    config = make_config(json.loads(str(arrays["config"])), **changes)
    return Converted(model_class(config), make_rules(config)), parameters, gradients, arrays


@of_peers
def test_our_logits_are_those_of_the_public_model(name):
    ours, parameters, _, arrays = golden(name)
    lengths = [int(key.removeprefix("logits/")) for key in arrays if key.removeprefix("logits/").isdigit()]
    assert len(lengths) >= 2
    for length in lengths:
        assert_close(ours.logits(parameters, arrays["tokens"][:, :length]), arrays[f"logits/{length}"])


@of_peers
def test_our_gradients_are_those_of_the_public_model(name):
    ours, parameters, expected, arrays = golden(name)
    projection = arrays["projection"]
    tokens = jnp.asarray(arrays["tokens"][:, : projection.shape[1]])
    gradients, _ = ours.gradients(parameters, None, tokens, projection)
    assert_close_by_norm(gradients, expected, relative=5e-5)


@of_peers
def test_parameters_survive_the_way_there_and_back_to_the_bit(name):
    ours, parameters, _, _ = golden(name)
    params = params_of(ours.model, ours.rules, parameters)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes_of(ours.model))
    back = state_dict_of(ours.model, ours.rules, params)
    assert back.keys() == parameters.keys()
    for key, value in parameters.items():
        # A scale that they store as its difference from one is rounded once more.
        is_rounded = name.startswith("xlstm") and "norm" in key
        np.testing.assert_allclose(back[key], value, rtol=0, atol=1e-7 if is_rounded else 0)


def test_a_continuation_from_a_state_is_that_of_hugging_face():
    ours, parameters, _, arrays = golden("hf_xlstm")
    _, state = ours.logits_and_state(parameters, arrays["tokens"][:, :13])
    (cell,) = state
    for layer in range(2):
        assert_close(cell.memory[layer], arrays[f"state_13/{layer}/C"])
        assert_close(cell.normalizer[layer], arrays[f"state_13/{layer}/n"])
        assert_close(cell.stabilizer[layer], arrays[f"state_13/{layer}/m"][..., 0])
    logits, _ = ours.logits_and_state(parameters, arrays["tokens"][:, 13:18], state)
    assert_close(logits, arrays["logits/13_to_18"])


def test_a_continuation_from_a_cache_is_that_of_hugging_face():
    ours, parameters, _, arrays = golden("hf_llama")
    _, state = ours.logits_and_state(parameters, arrays["tokens"][:, :7])
    logits, state = ours.logits_and_state(parameters, arrays["tokens"][:, 7:11], state)
    assert_close(logits, arrays["logits/7_to_11"])
    (cache,) = state
    to_halves = llama.neighbouring_pairs(cache.keys.shape[-1]).to_theirs
    for layer in range(2):
        keys = jnp.moveaxis(to_halves([jnp.moveaxis(cache.keys[layer, :, :11], -1, 0)]), 0, -1)
        assert_close(keys, arrays[f"state_11/{layer}/keys"].swapaxes(1, 2))
        assert_close(cache.values[layer, :, :11], arrays[f"state_11/{layer}/values"].swapaxes(1, 2))


def test_a_state_dict_of_another_model_is_refused():
    ours, parameters, _, _ = golden("hf_xlstm")
    with pytest.raises(ValueError, match=r"1 entries are missing \(lm_head.weight\), 1 have no rule \(head\)"):
        to_ours({("head" if k == "lm_head.weight" else k): v for k, v in parameters.items()}, ours.rules)
