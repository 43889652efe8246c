"""The model: what it computes, what its tokens see, and what its state carries."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.llama.builds import SMALL, apply, build, draw_tokens, gradients, unrolled
from models.llama.reference import llama_logits
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.configs import ConfigDict
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer

pytestmark = pytest.mark.slow

VARIANTS = {
    "grouped queries": {},
    "options": {
        "qk_norm": True,
        "use_bias": True,
        "logits_soft_cap": 2.0,
        "tie_weights": True,
        "theta": 50.0,
        "norm_eps": 1e-2,
        "ffn_dim": None,
        "ffn_multiple_of": 10,
        "ffn_dim_multiplier": 0.5,
    },
    "every token sees all, every head has its keys": {"causal": False, "num_kv_heads": None},
}
of_scans = pytest.mark.parametrize("scan_blocks", [True, False], ids=["scanned", "unrolled"])

BORDERS = jnp.array([[1, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0]], bool)
POSITIONS = jnp.array([[0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 2]], jnp.int32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_a_llama_in_numpy(variant):
    model, params = build(**VARIANTS[variant])
    tokens = draw_tokens()
    expected = llama_logits(unrolled(params, 2), np.asarray(tokens), model.config)
    assert_close(apply(model, params, tokens), expected)


def test_logits_of_packed_documents_are_those_of_a_llama_in_numpy():
    model, params = build(mask_across_document_boundaries=True)
    tokens, segments = draw_tokens(), np.cumsum(BORDERS, axis=1)
    expected = llama_logits(unrolled(params, 2), np.asarray(tokens), model.config, POSITIONS, segments)
    assert_close(apply(model, params, tokens, POSITIONS, BORDERS), expected)


@of_scans
def test_the_last_logits_alone_are_those_of_the_full_pass(scan_blocks):
    model, params = build(scan_blocks=scan_blocks)
    tokens = draw_tokens()
    whole, end = apply(model, params, tokens, return_state=True)
    _, middle = apply(model, params, tokens[:, :6], return_state=True)
    run = jax.jit(lambda p, state: model.apply(p, tokens[:, 6:], state=state, return_state=True, last_only=True))
    last, end_of_last = run({"params": params}, middle)
    assert_close(last, whole[:, -1:])
    assert_close(end_of_last, end)


def test_a_token_changes_no_logits_before_it():
    model, params = build()
    tokens = draw_tokens()
    before, after = (apply(model, params, x) for x in (tokens, tokens.at[:, 6].add(1)))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.all(np.max(np.abs(before - after), axis=-1)[:, 6:] > 1e-4)


def test_packed_documents_equal_separate_ones():
    model, params = build(mask_across_document_boundaries=True)
    tokens = draw_tokens()
    packed = apply(model, params, tokens, POSITIONS, BORDERS)
    first, middle, last = (apply(model, params, tokens[:1, part]) for part in (slice(3), slice(3, 8), slice(8, 11)))
    assert_close(packed[:1], jnp.concatenate([first, middle, last], axis=1))


def test_documents_see_each_other_unless_masked():
    model, params = build()
    tokens = draw_tokens()
    np.testing.assert_array_equal(apply(model, params, tokens, None, BORDERS), apply(model, params, tokens))
    masked_model, _ = build(mask_across_document_boundaries=True)
    masked = apply(masked_model, params, tokens, None, BORDERS)
    assert not np.allclose(masked[0, 3:], apply(model, params, tokens)[0, 3:], atol=1e-3)


def test_prefill_and_decoding_equal_one_pass():
    model, params = build()
    tokens = draw_tokens()
    logits, state = apply(model, params, tokens[:, :6], return_state=True)
    parts = [logits]
    for token in jnp.split(tokens[:, 6:], 5, axis=1):
        logits, state = apply(model, params, token, state=state, return_state=True)
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), apply(model, params, tokens))


@pytest.mark.parametrize(("split", "given_positions"), [(5, True), (8, False)], ids=["in documents", "between them"])
def test_a_split_sequence_equals_a_whole_one(split, given_positions):
    model, params = build(mask_across_document_boundaries=True)
    tokens, positions = draw_tokens(), POSITIONS if given_positions else None
    whole, end = apply(model, params, tokens, positions, BORDERS, return_state=True)
    state, parts = model.init_state(2), []
    for part in (slice(split), slice(split, None)):
        own_positions = None if positions is None else positions[:, part]
        logits, state = apply(
            model, params, tokens[:, part], own_positions, BORDERS[:, part], state=state, return_state=True
        )
        parts.append(logits)
    assert_close(jnp.concatenate(parts, axis=1), whole)
    assert_close(state, end)


def test_a_document_goes_on_where_no_borders_are_given():
    model, params = build(mask_across_document_boundaries=True)
    tokens = draw_tokens()
    whole = apply(model, params, tokens, POSITIONS, BORDERS)
    _, state = apply(model, params, tokens[:, :9], POSITIONS[:, :9], BORDERS[:, :9], return_state=True)
    assert_close(apply(model, params, tokens[:, 9:], state=state), whole[:, 9:])


def test_rows_of_a_state_may_hold_different_numbers_of_tokens():
    model, params = build()
    tokens = draw_tokens()
    whole = apply(model, params, tokens)
    _, short = apply(model, params, tokens[:, :6], return_state=True)
    _, long = apply(model, params, tokens[:, 6:7], state=short, return_state=True)
    mixed = jax.tree.map(lambda a, b: jnp.stack([a[:, 0], b[:, 1]], axis=1), short, long)
    following = jnp.stack([tokens[0, 6:7], tokens[1, 7:8]])
    logits, _ = apply(model, params, following, state=mixed, return_state=True)
    assert_close(logits, jnp.stack([whole[0, 6:7], whole[1, 7:8]]))


@of_scans
def test_a_state_has_the_layout_of_the_empty_one(scan_blocks):
    model, params = build(scan_blocks=scan_blocks)
    _, state = jax.eval_shape(lambda p: model.apply({"params": p}, draw_tokens(), return_state=True), params)
    empty = model.init_state(2)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)


def test_no_cache_is_made_unless_a_state_is_asked_for():
    model, params = build(max_state_length=97)

    def program(**kwargs):
        return str(jax.make_jaxpr(lambda p: model.apply({"params": p}, draw_tokens(), **kwargs))(params))

    assert "[2,97,2,6]" in program(return_state=True)
    assert "[2,97,2,6]" not in program()


def test_losses_are_the_cross_entropies_of_the_logits():
    model, params = build(loss_chunk_size=5, logits_soft_cap=3.0)
    tokens, targets = draw_tokens(), draw_tokens(seed=1)
    losses, hits = apply(model, params, tokens, targets=targets)
    logits = np.asarray(apply(model, params, tokens), np.float64)
    log_probabilities = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    expected = -np.take_along_axis(log_probabilities, np.asarray(targets)[..., None], axis=-1)[..., 0]
    assert_close(losses, expected)
    np.testing.assert_array_equal(hits, np.argmax(logits, axis=-1) == targets)


def test_unrolled_blocks_equal_scanned_ones():
    (scanned, params), (other, _) = build(), build(scan_blocks=False)
    split = unrolled(params, 2)
    assert_close(apply(other, split, draw_tokens()), apply(scanned, params, draw_tokens()))
    expected = gradients(scanned, params)
    for name, gradient in gradients(other, split).items():
        index = re.search(r"block_(\d)'", name)
        whole = expected[re.sub(r"block_\d'", "block'", name)]
        assert_close(gradient, whole[int(index[1])] if index else whole)


@pytest.mark.parametrize(
    ("remat", "scan_blocks"), [("full", True), ("dots", False), ("norms", True), ("offload", True)]
)
def test_gradients_do_not_depend_on_what_is_computed_again(remat, scan_blocks):
    plain, params = build(scan_blocks=scan_blocks)
    model, _ = build(scan_blocks=scan_blocks, remat=remat)
    assert_close_by_norm(gradients(model, params), gradients(plain, params), relative=1e-5)


@pytest.mark.parametrize("of_embedding", [False, True], ids=["branches", "embeddings too"])
def test_dropout_is_on_in_training_only(of_embedding):
    (plain, params), (model, _) = build(), build(dropout_rate=0.5, add_embedding_dropout=of_embedding)
    tokens = draw_tokens()
    first, same, other = (apply(model, params, tokens, train=True, key=jax.random.key(seed)) for seed in (1, 1, 2))
    evaluated = apply(model, params, tokens)
    np.testing.assert_array_equal(evaluated, apply(plain, params, tokens))
    np.testing.assert_array_equal(first, same)
    assert not np.allclose(first, other, atol=1e-2)
    assert not np.allclose(first, evaluated, atol=1e-2)


def test_embedding_dropout_reaches_the_embedding():
    """With branches that add nothing, only the embedding is left to drop."""
    silent = {}
    for of_embedding in (True, False):
        model, params = build(dropout_rate=0.5, add_embedding_dropout=of_embedding)
        blocks = jax.tree.map(jnp.zeros_like, params["block_stack"])
        params = {**params, "block_stack": blocks}
        trained = apply(model, params, draw_tokens(), train=True, key=jax.random.key(1))
        silent[of_embedding] = np.array_equal(trained, apply(model, params, draw_tokens()))
    assert silent == {True: False, False: True}


def test_tied_weights_leave_no_projection():
    _, params = build(tie_weights=True)
    assert params["lm_head"].keys() == {"out_norm"}


def test_parameters_have_the_documented_names():
    _, params = build(qk_norm=True)
    block = params["block_stack"]["block"]
    assert params.keys() == {"token_embedding", "block_stack", "lm_head"}
    assert block.keys() == {"attn", "ffn"}
    assert block["attn"].keys() == {"pre_norm", "q", "k", "v", "out", "q_norm", "k_norm"}
    assert block["ffn"].keys() == {"pre_norm", "gate", "up", "down"}
    assert params["lm_head"].keys() == {"out_norm", "out_dense"}


def test_parameters_are_drawn_with_the_documented_deviations(key):
    model = LlamaTransformer(LlamaConfig(vocab_size=512, embedding_dim=256, num_blocks=3, head_dim=64))
    params = jax.jit(lambda k: model.init(k, jnp.zeros((1, 2), jnp.int32))["params"])(key)
    small, wang = np.sqrt(2 / (5 * 256)), 2 / 6 / np.sqrt(256)
    block = params["block_stack"]["block"]
    expected = {("attn", name): small for name in "qkv"} | {("ffn", name): small for name in ("gate", "up")}
    expected |= {("attn", "out"): wang, ("ffn", "down"): wang}
    for (branch, name), deviation in expected.items():
        np.testing.assert_allclose(np.std(block[branch][name]["kernel"], axis=(1, 2)), deviation, rtol=0.02)
    np.testing.assert_allclose(np.std(params["token_embedding"]["embedding"]), small, rtol=0.02)
    assert block["ffn"]["up"]["kernel"].shape == (3, 256, 704)


def test_statistics_of_branches_are_sown():
    model, params = build()
    _, sown = model.apply({"params": params}, draw_tokens(), mutable=["intermediates"])
    block = sown["intermediates"]["block_stack"]["block"]
    assert block["attn"].keys() == {"attn_out_std", "attn_out_abs_max"}
    assert block["ffn"].keys() == {"ffn_out_std", "ffn_out_abs_max"}
    assert all(np.shape(leaf) == (2,) and np.all(leaf > 0) for leaf in jax.tree.leaves(block))


def test_half_precision_stays_close():
    model, params = build()
    half, _ = build(dtype="bfloat16")
    tokens = draw_tokens()
    exact, rounded = apply(model, params, tokens), apply(half, params, tokens)
    assert rounded.dtype == jnp.float32
    assert 1e-5 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 3e-2
    assert jax.tree.leaves(half.init_state(1))[0].dtype == jnp.bfloat16


def test_a_config_survives_being_written():
    parallel = ParallelConfig(fsdp_modules=("Block",), remat=())
    config = LlamaConfig(**SMALL, dtype="bfloat16", logits_soft_cap=30.0, remat="dots", parallel=parallel)
    assert ConfigDict.from_dict(LlamaConfig, config.to_dict()) == config
