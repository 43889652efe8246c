"""Stacks that mix attention with recurrent blocks are one model: state, documents, layouts, meshes, cost."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import make_mesh
from models.runs import PARALLEL, init, parameters_on, shaken, tokens, train_on, train_without_mesh, with_config
from tolerances import assert_close

from xlstm_jax.configs import ConfigError
from xlstm_jax.inference.decoding import for_decoding
from xlstm_jax.models.cost import count_flops, model_cost
from xlstm_jax.models.llama.attention import KVCache
from xlstm_jax.models.shared.layout import to_canonical
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig

pytestmark = pytest.mark.slow

VOCAB = 24
BASE = XLSTMConfig(
    vocab_size=VOCAB,
    embedding_dim=16,
    num_heads=2,
    num_blocks=4,
    block_kinds=("mlstm", "attention") * 2,
    chunk_size=8,
    ffn_dim=20,
    max_state_length=13,
)
STACKS = {
    "scanned": dataclasses.replace(BASE, num_kv_heads=1),
    "unrolled": dataclasses.replace(BASE, block_kinds=("attention", "mlstm", "slstm", "mlstm_up"), post_norm=True),
}
of_stacks = pytest.mark.parametrize("stack", STACKS)
TOKENS, TARGETS = tokens(VOCAB, rows=2, length=13)


@functools.cache
def ready(stack):
    """Return a model with parameters that all matter, and its jitted apply."""
    model = XLSTM(STACKS[stack])
    params = shaken(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :2])["params"])
    return model, {"params": params}, jax.jit(model.apply, static_argnames=("return_state",))


def decode(apply, variables, logits, state, start):
    """Return the logits of a prompt and of the tokens after it, one at a time."""
    steps = [logits]
    for position in range(start, TOKENS.shape[1]):
        logits, state = apply(variables, TOKENS[:, position : position + 1], state=state, return_state=True)
        steps.append(logits)
    return jnp.concatenate(steps, axis=1)


@of_stacks
def test_prefill_and_decoding_give_the_logits_of_the_full_pass(stack):
    _, variables, apply = ready(stack)
    logits, state = apply(variables, TOKENS[:, :4], return_state=True)
    assert_close(decode(apply, variables, logits, state, 4), apply(variables, TOKENS))


@of_stacks
def test_the_layout_for_decoding_computes_the_same(stack):
    model, variables, apply = ready(stack)
    other, params = for_decoding(model, variables["params"])
    run = jax.jit(other.apply, static_argnames=("return_state",))
    logits, state = run({"params": params}, TOKENS[:, :4], return_state=True)
    assert_close(decode(run, {"params": params}, logits, state, 4), apply(variables, TOKENS))


@of_stacks
def test_packed_documents_give_the_logits_of_separate_ones(stack):
    _, variables, apply = ready(stack)
    borders = (0, 5, 6, 13)
    marks = jnp.zeros(TOKENS.shape, bool).at[:, jnp.array(borders[1:-1])].set(True)
    packed, state = apply(variables, TOKENS[:, :-1], document_borders=marks[:, :-1], return_state=True)
    parts = jnp.concatenate([apply(variables, TOKENS[:, a:b]) for a, b in itertools.pairwise(borders)], axis=1)
    assert_close(packed, parts[:, :-1])
    after, _ = apply(variables, TOKENS[:, -1:], state=state, return_state=True)  # in the same document
    assert_close(after, parts[:, -1:])
    assert np.abs(packed - apply(variables, TOKENS)[:, :-1]).max() > 1e-2


def test_the_state_of_a_mixture_holds_that_of_each_kind():
    model, _, _ = ready("unrolled")
    state = jax.eval_shape(lambda: model.init_state(2))
    assert [type(own).__name__ for own in state] == ["KVCache", "MLSTMState", "SLSTMBlockState", "MLSTMUpState"]
    (cache,) = (own for own in state if isinstance(own, KVCache))
    assert cache.keys.shape == (2, BASE.max_state_length, 2, 8)


@of_stacks
def test_tokens_beyond_the_room_of_the_state_are_refused_or_nan(stack):
    _, variables, apply = ready(stack)
    with pytest.raises(ValueError, match="0 tokens and 14 more do not fit into max_state_length 13"):
        apply(variables, jnp.pad(TOKENS, ((0, 0), (0, 1))), return_state=True)
    _, state = apply(variables, TOKENS, return_state=True)
    beyond, _ = apply(variables, TOKENS[:, :1], state=state, return_state=True)
    assert np.isnan(beyond).all()


def test_unrolled_blocks_compute_what_scanned_ones_do():
    model, variables, apply = ready("scanned")
    params = to_canonical(variables["params"], model.config.kinds, scan=True)
    assert_close(with_config(model, scan_blocks=False).apply({"params": params}, TOKENS), apply(variables, TOKENS))


@of_stacks
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_cost_and_state_are_those_of_the_model(stack, remat):
    model, variables, _ = ready(stack)
    model = with_config(model, remat=remat)
    cost = model_cost(model.config, sequence_length=TOKENS.shape[1], batch_size=len(TOKENS))
    loss = lambda v: jnp.mean(model.apply(v, TOKENS, targets=TARGETS)[0])  # noqa: E731
    assert cost.flops.executed == count_flops(jax.grad(loss), variables)
    assert cost.parameters == sum(x.size for x in jax.tree.leaves(variables))
    state = jax.eval_shape(lambda: model.init_state(1))
    assert cost.state_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads 3 does not divide num_heads 2"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0, but must be at least 1"),
        ({"theta": 0.0}, "theta is 0.0, but must be positive"),
        ({"max_state_length": 0}, "max_state_length is 0, but must be at least 1"),
        ({"embedding_dim": 10, "qk_dim_factor": 1.0}, "head_dim is 5, but must be even"),
        ({"attention_backend": "cudnn"}, "bfloat16 or float16"),
        ({"block_kinds": "mlstm"}, "num_kv_heads is 1, but has no effect in blocks of kind mlstm, only in those "),
    ],
)
def test_attention_that_cannot_be_built_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(STACKS["scanned"], **changes)


def test_heads_of_keys_that_devices_cannot_share_are_refused(key):
    model = with_config(XLSTM(STACKS["scanned"]), num_kv_heads=1)
    draw = jax.shard_map(
        lambda key: model.init(key, TOKENS), mesh=make_mesh(tp=2), in_specs=None, out_specs=None, check_vma=False
    )
    with pytest.raises(ConfigError, match="2 heads of queries and 1 of keys and values cannot be split"):
        jax.eval_shape(draw, key)


ON_MESHES = XLSTM(
    dataclasses.replace(
        BASE,
        vocab_size=64,
        embedding_dim=32,
        num_heads=4,
        num_blocks=3,
        block_kinds=("mlstm", "slstm", "attention"),
        num_kv_heads=2,
        parallel=PARALLEL,
    )
)


def test_a_mesh_draws_the_parameters_of_one_device():
    of_mesh, of_device = (parameters_on(ON_MESHES, name) for name in ("dp2-fsdp2-tp2", "one device"))
    jax.tree.map(np.testing.assert_array_equal, of_mesh, of_device)


def test_a_mesh_trains_as_one_device_does():
    start = shaken(jax.jit(functools.partial(init, ON_MESHES))(jax.random.key(3)))
    gradients, losses = train_on(ON_MESHES, "dp2-fsdp2-tp2", start)
    expected_gradients, expected_losses = train_without_mesh(ON_MESHES, start)
    for actual, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-5 * np.linalg.norm(expected)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
