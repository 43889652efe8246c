"""Our Llama equals that of transformers: its outputs are in `tests/golden/hf_llama.npz`."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.llama.builds import apply, named
from tolerances import assert_close_by_norm

from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer

PATH = Path(__file__).parents[2] / "golden" / "hf_llama.npz"
RELATIVE = 1e-4

ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@pytest.fixture(scope="module")
def golden():
    """The file, its config and our model of the same shape."""
    arrays = dict(np.load(PATH, allow_pickle=False))
    theirs = json.loads(str(arrays["config"]))
    config = LlamaConfig(
        vocab_size=theirs["vocab_size"],
        embedding_dim=theirs["hidden_size"],
        num_blocks=theirs["num_hidden_layers"],
        head_dim=theirs["head_dim"],
        num_kv_heads=theirs["num_key_value_heads"],
        ffn_dim=theirs["intermediate_size"],
        norm_eps=theirs["rms_norm_eps"],
        theta=theirs["rope_parameters"]["rope_theta"],
        max_state_length=19,
        scan_blocks=False,
    )
    return arrays, LlamaTransformer(config)


def translate(arrays, prefix, config):
    """Lay out their parameters, or gradients, as ours."""

    def read(name):
        return jnp.asarray(arrays[f"{prefix}/{name}"])

    def kernel(name, turned=False):
        weight = read(f"{name}.weight")
        return {"kernel": neighbouring_pairs(weight, config.head_dim).T if turned else weight.T}

    blocks = {}
    for index in range(config.num_blocks):
        layer = f"model.layers.{index}"
        attention = {ours: kernel(f"{layer}.self_attn.{name}", ours in "qk") for ours, name in ATTENTION.items()}
        attention["pre_norm"] = {"scale": read(f"{layer}.input_layernorm.weight")}
        feed_forward = {ours: kernel(f"{layer}.mlp.{name}") for ours, name in FEED_FORWARD.items()}
        feed_forward["pre_norm"] = {"scale": read(f"{layer}.post_attention_layernorm.weight")}
        blocks[f"block_{index}"] = {"attn": attention, "ffn": feed_forward}
    return {
        "token_embedding": {"embedding": read("model.embed_tokens.weight")},
        "block_stack": blocks,
        "lm_head": {"out_norm": {"scale": read("model.norm.weight")}, "out_dense": kernel("lm_head")},
    }


def neighbouring_pairs(weight, head_dim):
    """Reorder the rows of each head: their feature `i` turns with `i + head_dim / 2`, our `2i` with `2i + 1`."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@pytest.mark.parametrize("length", [11, 19])
def test_logits_are_theirs(golden, length):
    arrays, model = golden
    logits = apply(model, translate(arrays, "param", model.config), jnp.asarray(arrays["tokens"][:, :length]))
    assert_close_by_norm({"logits": logits}, {"logits": arrays[f"logits/{length}"]}, relative=RELATIVE)


def test_gradients_are_theirs(golden):
    arrays, model = golden
    tokens, projection = jnp.asarray(arrays["tokens"][:, :11]), jnp.asarray(arrays["projection"])
    loss = lambda params: jnp.sum(model.apply({"params": params}, tokens) * projection)  # noqa: E731
    gradients = jax.jit(jax.grad(loss))(translate(arrays, "param", model.config))
    assert_close_by_norm(named(gradients), named(translate(arrays, "grad", model.config)), relative=RELATIVE)


def test_logits_and_values_after_a_cache_are_theirs(golden):
    arrays, model = golden
    params, tokens = translate(arrays, "param", model.config), jnp.asarray(arrays["tokens"])
    _, state = apply(model, params, tokens[:, :7], return_state=True)
    logits, state = apply(model, params, tokens[:, 7:11], state=state, return_state=True)
    actual, expected = {"logits": logits}, {"logits": arrays["logits/7_to_11"]}
    for index, cache in enumerate(state):
        theirs = arrays[f"state_11/{index}/keys"].transpose(0, 2, 1, 3)
        expected |= {
            f"keys {index}": theirs,
            f"values {index}": arrays[f"state_11/{index}/values"].transpose(0, 2, 1, 3),
        }
        halves = np.concatenate([cache.keys[:, :11, :, 0::2], cache.keys[:, :11, :, 1::2]], axis=-1)
        actual |= {f"keys {index}": halves, f"values {index}": cache.values[:, :11]}
    assert_close_by_norm(actual, expected, relative=RELATIVE)
