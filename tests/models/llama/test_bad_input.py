"""Bad input gets an error that says what to change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import make_mesh, on_mesh
from models.llama.builds import SMALL, apply, build, draw_tokens

from xlstm_jax.models.llama import LlamaConfig
from xlstm_jax.models.llama.attention import multihead_attention


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"ffn_dim": -1}, "ffn_dim is -1"),
        ({"head_dim": 7}, "multiple of head_dim 7"),
        ({"head_dim": 3}, "even"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide the 4 heads"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"add_embedding_dropout": True}, "dropout_rate 0"),
        ({"logits_soft_cap": -1.0}, "None for no cap"),
        ({"dtype": "int32"}, "floating-point"),
        ({"dtype": "bflaot16"}, "floating-point"),
        ({"attention_backend": "cudnn"}, "bfloat16 or float16"),
        ({"attention_backend": "cudnn", "dtype": "bfloat16"}, "multiple of 8"),
        ({"attention_backend": "pallas_triton"}, "'cudnn' on NVIDIA GPUs, or 'xla'"),
        ({"max_state_length": 0}, "max_state_length is 0"),
    ],
)
def test_a_config_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**(SMALL | changes))


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (3,)])
def test_there_must_be_tokens(shape):
    model, params = build()
    with pytest.raises(ValueError, match="at least one token"):
        model.apply({"params": params}, jnp.zeros(shape, jnp.int32))


@pytest.mark.parametrize("name", ["pos_idx", "document_borders", "targets"])
def test_what_belongs_to_tokens_has_their_shape(name):
    model, params = build()
    with pytest.raises(ValueError, match=f"{name} has shape"):
        model.apply({"params": params}, draw_tokens(), **{name: jnp.zeros((2, 3), jnp.int32)})


def test_a_state_of_another_model_is_refused():
    model, params = build()
    others = [
        build(num_kv_heads=1)[0].init_state(2),
        build(scan_blocks=False)[0].init_state(2),
        build(max_state_length=8)[0].init_state(2),
        model.init_state(3),
        {"memory": jnp.zeros(3)},
    ]
    for state in others:
        with pytest.raises(ValueError, match="not one of this model"):
            model.apply({"params": params}, draw_tokens(), state=state)


def test_a_model_that_looks_ahead_has_no_state():
    model, params = build(causal=False)
    with pytest.raises(ValueError, match="causal=False has no state"):
        model.apply({"params": params}, draw_tokens(), return_state=True)


def test_more_tokens_than_a_state_holds_are_refused():
    model, params = build()
    with pytest.raises(ValueError, match="17 more do not fit into max_state_length 16"):
        apply(model, params, draw_tokens(length=17), return_state=True)
    _, state = apply(model, params, draw_tokens(length=11), return_state=True)
    with pytest.raises(ValueError, match="holds 11 tokens and 6 more"):
        model.apply({"params": params}, draw_tokens(length=6), state=state)


def test_logits_of_tokens_that_a_state_has_no_room_for_are_nan():
    model, params = build()
    _, state = apply(model, params, draw_tokens(length=11), return_state=True)
    logits = apply(model, params, draw_tokens(length=7), state=state)
    assert np.all(np.isfinite(logits[:, :5]))
    assert np.all(np.isnan(logits[:, 5:]))


def test_heads_that_cannot_be_split_over_devices_are_refused():
    model, _ = build()
    with pytest.raises(ValueError, match=r"4 heads of queries and 2 of keys .* 4 devices"):
        on_mesh(lambda: model.init(jax.random.key(0), draw_tokens()), make_mesh(tp=4), in_specs=())()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (2, 8, 4)}, r"q has shape \(2, 8, 4\)"),
        ({"k": (2, 8, 2, 3)}, r"k has shape \(2, 8, 2, 3\), but q of shape \(2, 8, 4, 4\) needs"),
        ({"k": (2, 8, 3, 4)}, r"k has shape .* divides 4"),
        ({"v": (2, 7, 2, 4)}, r"v has shape .* needs \(2, 8, 2, 4\)"),
        ({"segment_ids": (2, 9)}, r"segment_ids has shape \(2, 9\), but .* needs \(2, 8\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_arrays_that_attention_cannot_use_are_refused_by_their_names(changes, message):
    shapes = {"q": (2, 8, 4, 4), "k": (2, 8, 2, 4), "v": (2, 8, 2, 4), "segment_ids": (2, 8), **changes}
    segment_ids = jnp.zeros(shapes.pop("segment_ids"), jnp.int32)
    with pytest.raises(ValueError, match=message):
        multihead_attention(**{name: jnp.ones(shape) for name, shape in shapes.items()}, segment_ids=segment_ids)
