"""The trainer of language models generates as the full pass does, and evaluates chunk by chunk as it does at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainer.runs import LENGTH, ROWS, VOCAB_SIZE, TokenLoader, make_trainer, model_config

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import Batch, LLMBatch, LLMIndexedBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.llm.sampling import greedy_sampling
from xlstm_jax.trainer.llm.trainer import LLMTrainerConfig
from xlstm_jax.trainer.metrics import get_metrics

pytestmark = pytest.mark.slow

LLAMA = ModelConfig(
    model_class=LlamaTransformer,
    parallel=ParallelConfig(),
    model_config=LlamaConfig(vocab_size=VOCAB_SIZE, embedding_dim=16, num_blocks=2, head_dim=8),
)
MODELS = {
    "mlstm": model_config(),
    "paper": model_config(block_kinds="xLSTM[1:1]"),
    "llama": LLAMA,
}
EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}
CASES = [("mlstm", {}), ("mlstm", EIGHT), ("paper", {}), ("llama", {"fsdp": 2})]


@functools.cache
def build(name, sizes):
    return make_trainer(dict(sizes), model=MODELS[name], logger=None)


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_greedy_generation_follows_the_full_pass(name, sizes):
    trainer = build(name, tuple(sizes.items()))
    prefix = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 4))
    generate = trainer.get_generate_fn(max_length=9, token_sample_fn=greedy_sampling)
    tokens, is_valid = generate(trainer.state, jax.random.key(0), prefix)
    assert tokens.shape == (3, 9)
    assert is_valid.all()

    whole = make_trainer(model=MODELS[name], logger=None)  # The same seed gives the same parameters on every mesh.
    tokens = np.asarray(tokens)  # from one mesh to another
    logits = jax.jit(whole.model.apply)({"params": whole.state.params}, jnp.asarray(tokens))
    np.testing.assert_array_equal(tokens[:, :4], prefix)
    np.testing.assert_array_equal(tokens[:, 4:], np.argmax(logits[:, 3:-1], axis=-1))


def test_a_prefix_of_one_axis_has_a_row_for_each_token():
    trainer = build("mlstm", ())
    generate = trainer.get_generate_fn(max_length=6, token_sample_fn=greedy_sampling)
    rows, _ = generate(trainer.state, jax.random.key(0), np.array([1, 2, 3]))
    expected, _ = generate(trainer.state, jax.random.key(0), np.array([[1], [2], [3]]))
    assert rows.shape == (3, 6)
    np.testing.assert_array_equal(rows, expected)


def test_sequences_without_tokens_are_refused_before_anything_is_generated():
    with pytest.raises(ValueError, match="max_length is 0, but must be at least 1"):
        build("mlstm", ()).get_generate_fn(max_length=0)


def test_the_class_of_a_callback_in_the_place_of_its_config_is_refused(unchecked_shapes):
    with pytest.raises(ConfigError, match=r"callbacks has the class ModelCheckpointConfig: give a config"):
        make_trainer(callbacks=[ModelCheckpointConfig])


@pytest.mark.parametrize(
    ("name", "sizes", "chunk_size"), [*((*case, 5) for case in CASES), ("mlstm", {}, LENGTH), ("mlstm", {}, LENGTH + 1)]
)
def test_evaluation_in_chunks_is_evaluation_at_once(name, sizes, chunk_size):
    trainer = build(name, tuple(sizes.items()))
    batch = next(TokenLoader(trainer.mesh))
    in_chunks = trainer.create_recurrent_evaluation_step_function(chunk_size)
    metrics = in_chunks(trainer.state, batch, None)
    metrics = in_chunks(trainer.state, batch, metrics)
    expected = get_metrics(trainer.eval_step(trainer.state, batch, None))[1]
    actual = get_metrics(metrics)[1]
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, err_msg=key)
    assert metrics["loss"]["mean_nopostfix"]["count"] == 2 * np.sum(np.asarray(batch.targets_segmentation) != 0)


def test_evaluation_in_chunks_takes_batches_with_indices():
    trainer = build("mlstm", ())
    plain = next(TokenLoader(trainer.mesh))
    rows = jnp.arange(ROWS)
    batch = LLMIndexedBatch(**vars(plain), document_idx=rows, sequence_idx=rows)
    in_chunks = trainer.create_recurrent_evaluation_step_function(5)
    expected, actual = (get_metrics(in_chunks(trainer.state, x, None))[1] for x in (plain, batch))
    assert actual == expected


def test_a_cache_can_be_handed_in():
    trainer = build("mlstm", ())
    batch = next(TokenLoader(trainer.mesh))
    shapes = trainer.get_cache_shape_dtype_struct(batch)
    given = []

    def init(shapes):
        given.append(shapes)
        return jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), shapes)

    with_ones = trainer.create_recurrent_evaluation_step_function(LENGTH, cache_init_fn=init)
    with_ones(trainer.state, batch, None)
    assert jax.tree.map(lambda x: x.shape, given[0]) == jax.tree.map(lambda x: x.shape, shapes)


def test_a_model_of_another_batch_is_refused():
    trainer = build("mlstm", ())
    plain = Batch(inputs=np.zeros((8, 4), np.int32), targets=np.zeros((8, 4), np.int32))
    with pytest.raises(TypeError, match="batches of LLMBatch, but this is a Batch"):
        trainer.train_model([plain], num_epochs=1)


def test_statistics_of_logits_are_reported_if_asked_for():
    trainer = make_trainer(EIGHT, logger=None, log_logit_stats=True, gradient_accumulate_steps=2)
    _, metrics = trainer.train_step(trainer.state, next(TokenLoader(trainer.mesh)), None)
    row = get_metrics(metrics)[1]
    whole = build("mlstm", ())
    batch = next(TokenLoader(whole.mesh))
    logits = whole.model.apply(
        {"params": whole.state.params}, batch.inputs, document_borders=batch.get_document_borders()
    )
    np.testing.assert_allclose(row["logits_max_max"], np.max(logits), rtol=1e-5)
    np.testing.assert_allclose(row["logits_norm_mean"], np.mean(np.linalg.norm(logits, axis=-1)), rtol=1e-5)


def test_the_bytes_of_a_token_have_to_be_positive():
    with pytest.raises(ConfigError, match="bytes_per_token is 0"):
        LLMTrainerConfig(bytes_per_token=0.0)


def test_shapes_are_enough_to_build_a_trainer():
    assert isinstance(build("mlstm", ()).exmp_batch, LLMBatch)
    assert isinstance(build("mlstm", ()).exmp_batch.inputs, jax.ShapeDtypeStruct)
