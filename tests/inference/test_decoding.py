"""A model laid out for decoding is the same model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.runs import shaken, tokens
from tolerances import assert_close

from xlstm_jax.distributed.dense import ColumnDense
from xlstm_jax.inference.decoding import for_decoding
from xlstm_jax.models.shared.projections import TransposedDense
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.utils.pytree_utils import flatten_dict

pytestmark = pytest.mark.slow

BASE = XLSTMConfig(vocab_size=24, embedding_dim=16, num_heads=2, num_blocks=4, chunk_size=8)
CONFIGS = {
    "mlstm": BASE,
    "written out, with biases": dataclasses.replace(BASE, scan_blocks=False, use_bias=True),
    "more norms": dataclasses.replace(BASE, post_norm=True, qk_norm=True, qk_norm_scale=True),
    "paper": dataclasses.replace(BASE, block_kinds="xLSTM[1:1]"),
}
TOKENS, _ = tokens(24, rows=2, length=5)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_for_decoding_computes_what_the_model_does(config):
    model = XLSTM(config)
    params = shaken(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :2])["params"])
    other, other_params = for_decoding(model, params)
    expected = jax.jit(model.apply)({"params": params}, TOKENS)
    state, steps = jax.jit(lambda: other.apply({}, 2, method="init_state"))(), []
    advance = jax.jit(lambda token, state: other.apply({"params": other_params}, token, state=state, return_state=True))
    for position in range(TOKENS.shape[1]):
        logits, state = advance(TOKENS[:, position : position + 1], state)
        steps.append(logits)
    assert_close(jnp.concatenate(steps, axis=1), expected)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_for_decoding_reads_a_prompt_as_the_model_does(config):
    model = XLSTM(config)
    params = shaken(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :2])["params"])
    other, other_params = for_decoding(model, params)
    actual, expected = (
        jax.jit(functools.partial(m.apply, return_state=True))({"params": p}, TOKENS)[0]
        for m, p in ((other, other_params), (model, params))
    )
    assert_close(actual, expected)


def test_the_gates_of_a_prompt_are_the_product_that_training_has(key):
    x, kernel = jax.random.normal(key, (2, 5, 64), jnp.bfloat16), jax.random.normal(key, (64, 4))
    options = {"features": 4, "axis_name": "tp", "dtype": jnp.float32}
    transposed = jax.jit(TransposedDense(**options).apply)
    expected = jax.jit(ColumnDense(**options).apply)({"params": {"kernel": kernel}}, x)
    np.testing.assert_array_equal(transposed({"params": {"kernel": kernel.T}}, x), expected)
    one = transposed({"params": {"kernel": kernel.T}}, x[:, :1])
    assert_close(one, expected[:, :1])
    assert not np.array_equal(one, expected[:, :1])  # it has all bits of the kernel


def test_blocks_lie_apart_and_layers_that_share_an_input_together():
    model = XLSTM(BASE)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS[:, :2])["params"]
    laid_out = flatten_dict(jax.eval_shape(lambda: for_decoding(model, jax.tree.map(jnp.zeros_like, params))[1]))
    kernels = {name: x.shape for name, x in laid_out.items() if name.startswith("block_stack.block_3.")}
    assert {name.removeprefix("block_stack.block_3.") for name in kernels if name.endswith("kernel")} == {
        "mlstm.q+k+v+ogate.kernel",
        "mlstm.igate+fgate.kernel",
        "mlstm.out.kernel",
        "ffn.gate+up.kernel",
        "ffn.down.kernel",
    }
    assert kernels["block_stack.block_3.mlstm.q+k+v+ogate.kernel"] == (16, 8 + 8 + 16 + 16)
    assert kernels["block_stack.block_3.mlstm.igate+fgate.kernel"] == (2 + 2, 16)  # outputs first
