"""The names of Hugging Face's Llama: biases, tied weights, old files, and what our Llama is not."""

import jax
import numpy as np
import pytest
from conversion.loading import params_of, shapes_of, state_dict_of

from xlstm_jax.conversion.llama import config_from_huggingface, huggingface_rules, neighbouring_pairs
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer

THEIRS = {
    "vocab_size": 10,
    "hidden_size": 12,
    "intermediate_size": 7,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "rms_norm_eps": 1e-5,
}


def converter(**changes):
    config = config_from_huggingface(THEIRS | changes)
    model = LlamaTransformer(config)
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: draw.standard_normal(x.shape, np.float32), shapes_of(model))
    return model, huggingface_rules(config), params


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
    ],
    ids=["plain", "one head of keys", "biases", "tied weights"],
)
def test_parameters_survive_the_way_there_and_back_to_the_bit(changes):
    model, rules, params = converter(**changes)
    state_dict = state_dict_of(model, rules, params)
    assert ("lm_head.weight" in state_dict) != ("tie_word_embeddings" in changes)
    assert ("model.layers.1.self_attn.k_proj.bias" in state_dict) == ("attention_bias" in changes)
    jax.tree.map(np.testing.assert_array_equal, params_of(model, rules, state_dict)["params"], params)


def test_halves_of_features_become_neighbours():
    pairs = neighbouring_pairs(head_dim=6)
    rows = np.arange(12)
    (ours,) = pairs.to_ours(rows)
    assert ours.tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert pairs.to_theirs([ours]).tolist() == rows.tolist()


def test_a_state_dict_may_hold_tied_weights_twice():
    model, rules, params = converter(tie_word_embeddings=True)
    once = state_dict_of(model, rules, params)
    twice = once | {"lm_head.weight": once["model.embed_tokens.weight"].copy()}
    jax.tree.map(np.testing.assert_array_equal, params_of(model, rules, twice)["params"], params)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight.*tie_weights=False"):
        params_of(model, rules, twice | {"lm_head.weight": twice["lm_head.weight"] + 1})


def test_fields_that_a_file_lacks_have_the_defaults_of_hugging_face():
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in THEIRS.items() if name != "rms_norm_eps"} | {"num_key_value_heads": 1}
    assert config_from_huggingface(sizes) == config_from_huggingface(transformers.LlamaConfig(**sizes).to_dict())


def test_fields_of_files_old_and_new_are_read():
    old = config_from_huggingface(THEIRS | {"rope_theta": 5e5, "rope_scaling": None})
    new = config_from_huggingface(THEIRS | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert old == new
    assert (old.theta, old.head_dim, old.kv_heads, old.norm_eps) == (5e5, 4, 3, 1e-5)
    assert config_from_huggingface(THEIRS, max_state_length=9).max_state_length == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "mlp_bias is False"),
        ({"model_type": "mistral"}, "model_type is 'mistral', but must be 'llama'"),
        ({"intermediate_size": None}, "The config has no intermediate_size"),
        ({"head_dim": 6}, r"head_dim \* num_attention_heads is 18"),
    ],
)
def test_what_our_llama_is_not_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_huggingface(THEIRS | changes)


def test_norms_of_queries_have_no_place_in_their_model():
    with pytest.raises(ValueError, match="no norms of queries"):
        huggingface_rules(LlamaConfig(vocab_size=8, embedding_dim=8, num_blocks=1, head_dim=4, qk_norm=True))
