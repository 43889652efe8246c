"""Our Llama equals that of transformers."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conversion.loading import Converted

from xlstm_jax.conversion.llama import config_from_huggingface, huggingface_rules
from xlstm_jax.models.llama import LlamaTransformer

peers = pytest.importorskip("golden.peers", reason="compares with the packages of the extra 'parity'")
comparison = pytest.importorskip("parity.comparison")
torch = peers.torch

MODELS = {
    "a head of keys for each of queries": {"num_key_value_heads": 4},
    "grouped queries": {"num_key_value_heads": 2},
    "one head of keys": {"num_key_value_heads": 1},
    "tied weights": {"tie_word_embeddings": True},
    "biases, another base": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
    },
}
of_models = pytest.mark.parametrize("name", MODELS)


@functools.cache
def theirs(name):
    model = peers.hf_llama(**MODELS[name])
    peers.randomise(model, np.random.default_rng(41), norm_centre=1.0)
    return model.train()


@functools.cache
def ours(name):
    config = config_from_huggingface(theirs(name).config.to_dict(), max_state_length=19)
    return Converted(LlamaTransformer(config), huggingface_rules(config))


@functools.cache
def tokens():
    return peers.draw_tokens(np.random.default_rng(42), 64, 19)


@of_models
@pytest.mark.parametrize("length", [1, 19])
def test_logits_and_gradients_are_theirs(name, length):
    model = theirs(name)

    def run(tokens):
        return model(tokens, use_cache=False).logits

    comparison.assert_logits_and_gradients_are_those_of(model, ours(name), run, tokens()[:, :length])


@of_models
def test_logits_after_a_cache_are_theirs(name):
    own, arrays = ours(name), comparison.arrays_of(peers.parameters_of(theirs(name)))
    with torch.no_grad():
        cache = theirs(name)(tokens()[:, :7], use_cache=True).past_key_values
        expected = theirs(name)(tokens()[:, 7:], past_key_values=cache, use_cache=True).logits
    all_tokens = jnp.asarray(tokens().numpy())
    _, state = own.logits_and_state(arrays, all_tokens[:, :7])
    logits, _ = own.logits_and_state(arrays, all_tokens[:, 7:], state)
    comparison.assert_same({"logits": logits}, {"logits": expected})


@of_models
def test_parameters_of_ours_work_in_their_model(name):
    model = peers.hf_llama(**MODELS[name])

    def run(tokens):
        return model(tokens, use_cache=False).logits

    missing = ["lm_head.weight"] if model.config.tie_word_embeddings else []
    comparison.assert_our_parameters_work_in(model, ours(name), run, tokens(), missing=missing)
