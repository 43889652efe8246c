"""Generation equals choosing from the full pass over all tokens so far."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from meshes import BATCH, make_mesh, on_mesh
from models.runs import PARALLEL, place_on, shaken, with_config

from xlstm_jax.common_types import TrainState
from xlstm_jax.inference.generate import generate
from xlstm_jax.inference.sampling import greedy_sampling, temperature_sampling
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.llm.sampling import generate_tokens

pytestmark = pytest.mark.slow

VOCAB, ROWS, PREFIX, LENGTH = 16, 8, 5, 12


def xlstm(kinds, **fields):
    return XLSTM(
        XLSTMConfig(
            vocab_size=VOCAB,
            embedding_dim=16,
            num_heads=2,
            num_blocks=2,
            block_kinds=kinds,
            chunk_size=4,
            parallel=PARALLEL,
            **fields,
        )
    )


MODELS = {
    "mlstm": xlstm("mlstm", input_gate_bias_init=-1.0),
    "paper": xlstm("xLSTM[1:1]"),
    "llama": LlamaTransformer(
        LlamaConfig(
            vocab_size=VOCAB, embedding_dim=16, num_blocks=2, head_dim=8, ffn_multiple_of=16, max_state_length=LENGTH
        )
    ),
}


@functools.cache
def train_state(name):
    model = MODELS[name]
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    params = jax.tree.map(lambda x: 3 * x, shaken(params))
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.identity(), rng=None)


PREFIXES = np.random.default_rng(0).integers(1, VOCAB, (ROWS, PREFIX)).astype(np.int32)


@functools.cache
def logits_of(name):
    state = train_state(name)
    return jax.jit(lambda tokens: state.apply_fn({"params": state.params}, tokens))


def expected_tokens(name, prefix, mask, eod=-1):
    """Choose the likeliest token of the full pass, position by position."""
    tokens, valid = np.zeros((2, len(prefix), LENGTH), np.int32)
    tokens[:, 0], valid[:, 0] = prefix[:, 0], 1
    ended = np.zeros(len(prefix), bool)
    for index in range(1, LENGTH):
        logits = logits_of(name)(tokens)[:, index - 1]
        given = mask[:, index] if index < prefix.shape[1] else np.zeros(len(prefix), bool)
        chosen = np.argmax(logits, axis=-1)
        chosen = np.where(given, prefix[:, min(index, prefix.shape[1] - 1)], chosen)
        tokens[:, index], valid[:, index] = np.where(ended, 0, chosen), ~ended
        ended |= ~given & (tokens[:, index] == eod) & ~ended
    return tokens, valid.astype(bool)


def run(name, prefix=PREFIXES, mask=None, **options):
    options = {"max_length": LENGTH, "token_sample_fn": greedy_sampling, **options}
    state = train_state(name)
    return jax.jit(lambda prefix, mask: generate_tokens(state, jax.random.key(1), prefix, mask, **options))(
        prefix, mask
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("masked", ["no mask", "all given", "ragged"])
def test_greedy_tokens_are_those_of_the_full_pass(name, masked):
    mask = np.ones(PREFIXES.shape, bool)
    if masked == "ragged":
        mask = np.arange(PREFIX) < np.random.default_rng(1).integers(1, PREFIX + 1, (ROWS, 1))
    expected, _ = expected_tokens(name, PREFIXES, mask)
    tokens, is_valid = run(name, mask=None if masked == "no mask" else mask)
    np.testing.assert_array_equal(tokens, expected)
    assert np.all(is_valid)


@pytest.mark.parametrize("is_ragged", [False, True])
def test_a_mask_of_zeros_and_ones_is_one_of_booleans(is_ragged):
    mask = np.ones(PREFIXES.shape, bool)
    mask[:, 3:] = not is_ragged
    np.testing.assert_array_equal(run("mlstm", mask=mask.astype(np.int32))[0], run("mlstm", mask=mask)[0])


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_prompt_are_held_for_its_last_position_alone(name):
    model = with_config(MODELS[name], vocab_size=19)  # a size that nothing else has
    params = jax.eval_shape(model.init, jax.random.key(0), PREFIXES)["params"]
    state = train_state(name).replace(apply_fn=model.apply)

    def program(params, prefix):
        return generate_tokens(state.replace(params=params), jax.random.key(1), prefix, None, max_length=LENGTH)

    text = str(jax.make_jaxpr(program)(params, PREFIXES))
    assert f"f32[{ROWS},1,19]" in text
    assert f"f32[{ROWS},{PREFIX},19]" not in text


@pytest.mark.parametrize("masked", [False, True])
def test_one_token_is_prefix_enough(masked):
    prefix = PREFIXES[:, :1]
    mask = np.zeros(prefix.shape, bool) if masked else None
    tokens, is_valid = run("mlstm", prefix, mask)
    np.testing.assert_array_equal(tokens, expected_tokens("mlstm", prefix, np.ones(prefix.shape, bool))[0])
    assert np.all(is_valid)


def test_a_sequence_ends_after_a_generated_end_of_document():
    mask = np.ones(PREFIXES.shape, bool)
    unbounded, _ = expected_tokens("mlstm", PREFIXES, mask)
    eod = int(unbounded[0, PREFIX + 1])
    prefix = PREFIXES.copy()
    prefix[1, 1] = eod
    expected, expected_valid = expected_tokens("mlstm", prefix, mask, eod)
    tokens, is_valid = run("mlstm", prefix, eod_token_id=eod)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(is_valid, expected_valid)
    assert not np.all(is_valid)
    assert np.all(is_valid[1, : PREFIX + 1])
    assert np.all(np.asarray(tokens)[~np.asarray(is_valid)] == 0)


def test_a_given_end_of_document_does_not_end_a_sequence_whose_prompt_is_read_token_by_token():
    eod = 1
    prefix, mask = np.where(eod == PREFIXES, 2, PREFIXES), np.ones(PREFIXES.shape, bool)
    prefix[0, 2], mask[1, 3:] = eod, False
    expected, expected_valid = expected_tokens("mlstm", prefix, mask, eod)
    tokens, is_valid = run("mlstm", prefix, mask, eod_token_id=eod)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(is_valid, expected_valid)
    assert np.all(is_valid[0, : PREFIX + 1])


@pytest.mark.parametrize("gather_params_once", [False, True])
def test_tokens_are_the_same_on_a_mesh(gather_params_once):
    mesh, whole = make_mesh(dp=2, fsdp=4), train_state("mlstm")
    params, like = place_on(MODELS["mlstm"], mesh, whole.params)
    eod = int(expected_tokens("mlstm", PREFIXES, np.ones(PREFIXES.shape, bool))[0][0, PREFIX + 1])

    def program(params, prefix):
        state = whole.replace(params=params)
        return generate_tokens(
            state,
            jax.random.key(1),
            prefix,
            None,
            max_length=LENGTH,
            eod_token_id=eod,
            token_sample_fn=greedy_sampling,
            gather_params_once=gather_params_once,
        )

    tokens, is_valid = on_mesh(program, mesh, (like, BATCH), BATCH)(params, PREFIXES)
    expected, expected_valid = run("mlstm", eod_token_id=eod)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(is_valid, expected_valid)


def test_a_prefix_of_one_axis_is_one_token_for_each_sequence():
    tokens, _ = run("mlstm", PREFIXES[:, 0], PREFIXES[:, 0] > 0)
    np.testing.assert_array_equal(tokens, run("mlstm", PREFIXES[:, :1], PREFIXES[:, :1] > 0)[0])
    assert tokens.shape == (ROWS, LENGTH)


@pytest.mark.parametrize(
    ("prefix", "mask", "message"),
    [
        (PREFIXES.astype(np.float32), None, "prefix_tokens are float32.*int32"),
        (PREFIXES[None], None, r"shape \(1, 8, 5\).*\[batch, length\]"),
        (PREFIXES, np.ones((ROWS, 4), bool), r"prefix_mask has the shape \(8, 4\), .* \(8, 5\)"),
        (PREFIXES, np.ones(PREFIX, bool), r"prefix_mask has the shape \(5,\)"),
        (PREFIXES[:, 0], np.ones((ROWS, 1), bool), r"prefix_mask has the shape \(8, 1\)"),
    ],
    ids=["floats", "three axes", "a short mask", "a mask of one row", "a mask with more axes"],
)
def test_a_prefix_that_cannot_be_rows_of_tokens_is_refused(prefix, mask, message):
    prefix, mask = jnp.asarray(prefix), None if mask is None else jnp.asarray(mask)
    with pytest.raises(ValueError, match=message):
        generate_tokens(train_state("mlstm"), jax.random.key(1), prefix, mask, max_length=LENGTH)


def test_what_is_drawn_does_not_depend_on_how_the_prompt_is_read():
    drawn, _ = run("mlstm", token_sample_fn=temperature_sampling)
    masked, _ = run("mlstm", mask=np.ones(PREFIXES.shape, bool), token_sample_fn=temperature_sampling)
    np.testing.assert_array_equal(drawn, masked)
    assert np.any(drawn != run("mlstm")[0])


def test_positions_with_the_same_logits_are_drawn_independently(key):
    def advance(tokens, state):
        return jnp.zeros((*tokens.shape, 1000)), state

    tokens, _ = generate(advance, {}, key, jnp.zeros((4, 1), jnp.int32), max_length=33)
    assert len(np.unique(tokens[:, 1:])) > 100


def test_a_prefix_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="max_length 3"):
        run("mlstm", max_length=3)


def test_samples_have_the_probabilities_of_the_logits(key):
    logits = jnp.log(jnp.asarray([0.1, 0.2, 0.7]))
    many = jnp.broadcast_to(logits, (20000, 3))
    frequencies = np.bincount(temperature_sampling(many, key), minlength=3) / 20000
    np.testing.assert_allclose(frequencies, [0.1, 0.2, 0.7], atol=0.02)
    sharper = np.bincount(temperature_sampling(many, key, 0.5), minlength=3) / 20000
    np.testing.assert_allclose(sharper, np.array([0.01, 0.04, 0.49]) / 0.54, atol=0.02)
    np.testing.assert_array_equal(temperature_sampling(many, key, 0.0), 2)
    with pytest.raises(ValueError, match=r"temperature is -1\.0, but must be"):
        temperature_sampling(many, key, -1.0)
