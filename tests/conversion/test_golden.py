"""Our models with the parameters of public implementations give their logits, states and gradients."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.conversion.rules import to_ours, to_theirs
from xlstm_jax.conversion.xlstm import config_from_huggingface, config_from_paper, huggingface_rules, paper_rules
from xlstm_jax.models.shared.layout import from_canonical, to_canonical
from xlstm_jax.models.xlstm import XLSTM

GOLDEN = Path(__file__).parents[1] / "golden"
PEERS = {
    "hf_xlstm": (config_from_huggingface, huggingface_rules),
    "xlstm_mlstm_block": (config_from_paper, paper_rules),
    "xlstm_slstm_block": (config_from_paper, paper_rules),
    "xlstm_mixed": (config_from_paper, paper_rules),
}
of_peers = pytest.mark.parametrize("name", PEERS)


@functools.cache
def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    parameters, gradients = (
        {k.removeprefix(p): v for k, v in arrays.items() if k.startswith(p)} for p in ("param/", "grad/")
    )
    make_config, make_rules = PEERS[name]
    config = make_config(json.loads(str(arrays["config"])), chunk_size=8)
    return XLSTM(config), make_rules(config), parameters, gradients, arrays


def params_of(model, rules, state_dict):
    return {"params": from_canonical(to_ours(state_dict, rules), model.config.kinds, model.config.scan_blocks)}


@of_peers
def test_our_logits_are_those_of_the_public_model(name):
    model, rules, parameters, _, arrays = golden(name)
    variables = params_of(model, rules, parameters)
    lengths = [int(key.removeprefix("logits/")) for key in arrays if key.removeprefix("logits/").isdigit()]
    assert len(lengths) >= 2
    for length in lengths:
        assert_close(jax.jit(model.apply)(variables, arrays["tokens"][:, :length]), arrays[f"logits/{length}"])


@of_peers
def test_our_gradients_are_those_of_the_public_model(name):
    model, rules, parameters, expected, arrays = golden(name)
    projection = arrays["projection"]
    tokens = jnp.asarray(arrays["tokens"][:, : projection.shape[1]])

    @jax.jit
    @jax.grad
    def gradient(state_dict):
        return jnp.sum(model.apply(params_of(model, rules, state_dict), tokens) * projection)

    assert_close_by_norm(gradient(parameters), expected, relative=5e-5)


@of_peers
def test_parameters_survive_the_way_there_and_back_to_the_bit(name):
    model, rules, parameters, _, _ = golden(name)
    config = model.config
    ours = params_of(model, rules, parameters)["params"]
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, shapes)
    back = to_theirs(to_canonical(ours, config.kinds, config.scan_blocks), rules)
    assert back.keys() == parameters.keys()
    for key, value in parameters.items():
        # A scale that they store as its difference from one is rounded once more.
        np.testing.assert_allclose(back[key], value, rtol=0, atol=1e-7 if "norm" in key else 0)


def test_a_continuation_from_a_state_is_that_of_hugging_face():
    model, rules, parameters, _, arrays = golden("hf_xlstm")
    variables = params_of(model, rules, parameters)
    apply = jax.jit(functools.partial(model.apply, return_state=True))
    _, state = apply(variables, arrays["tokens"][:, :13])
    (cell,) = state
    for layer in range(2):
        assert_close(cell.memory[layer], arrays[f"state_13/{layer}/C"])
        assert_close(cell.normalizer[layer], arrays[f"state_13/{layer}/n"])
        assert_close(cell.stabilizer[layer], arrays[f"state_13/{layer}/m"][..., 0])
    logits, _ = apply(variables, arrays["tokens"][:, 13:18], state=state)
    assert_close(logits, arrays["logits/13_to_18"])


def test_a_state_dict_of_another_model_is_refused():
    _, rules, parameters, _, _ = golden("hf_xlstm")
    with pytest.raises(ValueError, match=r"1 entries are missing \(lm_head.weight\), 1 have no rule \(head\)"):
        to_ours({("head" if k == "lm_head.weight" else k): v for k, v in parameters.items()}, rules)
