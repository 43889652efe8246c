"""Models whose projections multiply in float8."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from models.runs import PARALLEL, init, mean_loss, shaken, tokens, train_on, with_config

from xlstm_jax.configs import ConfigError
from xlstm_jax.inference.decoding import for_decoding
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig

pytestmark = pytest.mark.slow

COMMON = {"vocab_size": 64, "embedding_dim": 32, "num_blocks": 2, "dtype": "bfloat16", "parallel": PARALLEL}
XLSTM_CONFIG = XLSTMConfig(num_heads=4, chunk_size=8, **COMMON)
MODELS = {
    "xlstm": (XLSTM(XLSTM_CONFIG), 8),  # q, k, v, ogate, out, gate, up, down
    "xlstm of the paper": (XLSTM(dataclasses.replace(XLSTM_CONFIG, block_kinds="xLSTM[1:1]", norm="layernorm")), 6),
    "llama": (LlamaTransformer(LlamaConfig(head_dim=8, **COMMON)), 7),
}
of_models = pytest.mark.parametrize("name", MODELS)


def in_float8(model):
    return with_config(model, float8=True)


@functools.cache
def start_of(name):
    model, _ = MODELS[name]
    return jax.device_get(shaken(jax.jit(functools.partial(init, model))(jax.random.key(3))))


def gradients_of(model, params):
    return jax.jit(jax.value_and_grad(functools.partial(mean_loss, model)))(params, *tokens(64))


def cosine(a, b):
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def test_losses_and_gradients_are_near_those_in_bfloat16():
    model, start = MODELS["xlstm"][0], start_of("xlstm")
    (loss, gradients), (loss8, gradients8) = (gradients_of(m, start) for m in (model, in_float8(model)))
    assert 0 < abs(loss - loss8) < 0.01 * loss
    assert 0.9 < cosine(gradients, gradients8) < 0.9999


def products_in(jaxpr):
    """Return the types of what is multiplied, also in what a jaxpr calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield str(equation.invars[0].aval.dtype)
        for called in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            called = getattr(called, "jaxpr", called)
            yield from products_in(called) if hasattr(called, "eqns") else ()


@of_models
def test_all_projections_but_those_of_gates_and_logits_are_in_float8(name):
    model, number = MODELS[name]
    params = jax.eval_shape(functools.partial(init, model), jax.random.key(3))
    jaxpr = jax.make_jaxpr(functools.partial(mean_loss, in_float8(model)))(params, *tokens(64)).jaxpr
    assert list(products_in(jaxpr)).count("float8_e4m3fn") == number  # of the scanned blocks


def test_a_mesh_changes_scales_but_hardly_anything_else():
    model, start = in_float8(MODELS["xlstm"][0]), start_of("xlstm")
    gradients, losses = train_on(model, "dp2-fsdp2-tp2", start, num_steps=1)
    expected_loss, expected = gradients_of(model, start)
    np.testing.assert_allclose(losses, [expected_loss], rtol=0.005)
    assert cosine(gradients, expected) > 0.9


def test_text_is_written_in_bfloat16():
    model = in_float8(MODELS["xlstm"][0])
    decoder, _ = for_decoding(model, start_of("xlstm"))
    assert not decoder.config.float8


def test_half_precision_has_no_range_for_it():
    with pytest.raises(ConfigError, match="set dtype to bfloat16"):
        dataclasses.replace(XLSTM_CONFIG, dtype="float16", float8=True)
