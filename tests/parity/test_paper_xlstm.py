"""Our blocks of the paper equal those of the package `xlstm`."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conversion.loading import Converted

from xlstm_jax.conversion.xlstm import config_from_paper, paper_rules
from xlstm_jax.models.xlstm import XLSTM

peers = pytest.importorskip("golden.peers", reason="compares with the packages of the extra 'parity'")
comparison = pytest.importorskip("parity.comparison")
torch = peers.torch

MODELS = {
    "mLSTM block": {"num_blocks": 1, "slstm_at": [], "num_heads": 4},
    "sLSTM block": {"num_blocks": 1, "slstm_at": [0], "num_heads": 2},
    "mixed": {"num_blocks": 4, "slstm_at": [1, 2], "num_heads": 2},
    "tied weights": {"num_blocks": 2, "slstm_at": [1], "num_heads": 4, "tie_weights": True},
}
of_models = pytest.mark.parametrize("name", MODELS)


@functools.cache
def theirs(name):
    model = peers.paper_xlstm(**MODELS[name])
    peers.randomise(model, np.random.default_rng(31), norm_centre=0.0)
    return model


@functools.cache
def ours(name):
    config = config_from_paper(dataclasses.asdict(theirs(name).config), chunk_size=8)
    return Converted(XLSTM(config), paper_rules(config))


@functools.cache
def tokens():
    return peers.draw_tokens(np.random.default_rng(32), 32, 16)


@of_models
@pytest.mark.parametrize("length", [1, 11, 16])
def test_logits_and_gradients_are_theirs(name, length):
    model = theirs(name)
    comparison.assert_logits_and_gradients_are_those_of(model, ours(name), model, tokens()[:, :length])


@of_models
def test_a_prompt_and_single_steps_give_their_single_steps(name):
    own, arrays = ours(name), comparison.arrays_of(peers.parameters_of(theirs(name)))
    with torch.no_grad():
        expected, _ = peers.paper_steps(theirs(name), tokens())
    all_tokens = jnp.asarray(tokens().numpy())
    logits, state = own.logits_and_state(arrays, all_tokens[:, :9])
    steps = [logits]
    for token in jnp.split(all_tokens[:, 9:], 7, axis=1):
        logits, state = own.logits_and_state(arrays, token, state)
        steps.append(logits)
    comparison.assert_same({"logits": jnp.concatenate(steps, axis=1)}, {"logits": expected})


@of_models
def test_parameters_of_ours_work_in_their_model(name):
    model = peers.paper_xlstm(**MODELS[name])
    missing = ["lm_head.weight"] if model.config.tie_weights else []
    comparison.assert_our_parameters_work_in(model, ours(name), model, tokens(), missing=missing)
