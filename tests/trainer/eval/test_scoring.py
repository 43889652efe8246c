"""Scores of rows are the same whether rows are read at once or in chunks, and whatever the model returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainer.eval.requests import trainer_on
from trainer.runs import ROWS, draw_batch

from xlstm_jax.dataset.batch import LLMIndexedBatch
from xlstm_jax.trainer.callbacks.extended_evaluation import EvalState
from xlstm_jax.trainer.eval.scoring import ChunkReader, score_rows
from xlstm_jax.trainer.placement import place_batch
from xlstm_jax.utils.partitioned import is_partitioned, unboxed

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
INDICES = np.arange(ROWS, dtype=np.int32)
BATCH = LLMIndexedBatch(**vars(draw_batch(0, 0)), document_idx=INDICES, sequence_idx=INDICES % 3)


@pytest.fixture(scope="module")
def trainer():
    return trainer_on(dp=2, fsdp=2, tp=2)


@pytest.fixture(scope="module")
def variables(trainer):
    """The parameters outside any mesh."""
    return {"params": jax.tree.map(lambda x: jnp.array(unboxed(x)), trainer.state.params, is_leaf=is_partitioned)}


@pytest.fixture(scope="module")
def losses(trainer, variables):
    """The losses of all targets, and whether they are the likeliest ones, with NumPy."""
    logits = np.array(
        jax.jit(trainer.model.apply)(variables, BATCH.inputs, document_borders=BATCH.get_document_borders()), np.float64
    )
    scores = np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)) - logits
    is_target = BATCH.targets_segmentation != 0
    of_targets = np.take_along_axis(scores, BATCH.targets[..., None], axis=-1)[..., 0]
    return np.where(is_target, of_targets, 0), is_target & (logits.argmax(-1) == BATCH.targets)


def assert_scores(metrics, losses):
    """Compare metrics, of any mode, with those of the rows of the batch."""
    sums, hits = (x.sum(axis=1) for x in losses)
    num_targets = (BATCH.targets_segmentation != 0).sum(axis=1)
    np.testing.assert_allclose(metrics["loglikelihood"]["value"], -sums, **TOLERANCE)
    np.testing.assert_array_equal(metrics["accuracies"]["value"], hits)
    for name in ("loglikelihood", "accuracies"):
        np.testing.assert_array_equal(metrics[name]["count"], num_targets)
    np.testing.assert_array_equal(metrics["document_idx"]["value"], BATCH.document_idx)
    np.testing.assert_array_equal(metrics["sequence_idx"]["value"], BATCH.sequence_idx)


@pytest.mark.parametrize("has_losses", [True, False])
def test_a_row_has_the_sum_over_its_targets_whether_the_model_takes_them_or_not(trainer, variables, losses, has_losses):
    apply = trainer.model.apply if has_losses else lambda *args, **kwargs: trainer.model.apply(*args, **kwargs)

    @jax.jit
    def score(batch):
        metrics, after = score_rows(apply, variables, batch, "tp")
        assert after is None
        return {name: {key: metric.get(key) for key in ("value", "count")} for name, metric in metrics.items()}

    assert_scores(score(BATCH), losses)


@pytest.mark.parametrize("chunk_size", [5, 20])
def test_rows_read_in_chunks_have_the_scores_of_whole_ones(trainer, losses, chunk_size):
    state = EvalState.from_train_state(train_state=trainer.state)
    reader = ChunkReader(trainer, chunk_size, ROWS)
    batch = place_batch(BATCH, trainer.mesh, trainer.batch_partition_specs)
    metrics, _ = reader.read(state, batch, reader.init_cache(state))
    assert_scores({name: next(iter(modes.values())) for name, modes in metrics.items()}, losses)


def test_a_state_goes_on_from_one_batch_to_the_next(trainer):
    state = EvalState.from_train_state(train_state=trainer.state)
    reader = ChunkReader(trainer, 4, ROWS)
    whole = LLMIndexedBatch.from_inputs(BATCH.inputs, INDICES, INDICES, targets=BATCH.targets)
    whole = place_batch(whole, trainer.mesh, trainer.batch_partition_specs)
    cache = reader.init_cache(state)
    for start in (0, 8):
        part = whole[:, start : start + 8]
        _, cache = reader.read(state, part, cache)
    _, expected = reader.read(state, whole, reader.init_cache(state))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **TOLERANCE), cache, expected)


def test_a_debugging_run_compiles_nothing(trainer, monkeypatch):
    monkeypatch.setattr(trainer.trainer_config, "debug", True)
    reader = ChunkReader(trainer, 4, ROWS)
    assert not any(hasattr(program, "lower") for program in vars(reader).values())


def test_no_columns_change_nothing(trainer):
    state = EvalState.from_train_state(train_state=trainer.state)
    reader = ChunkReader(trainer, 4, ROWS)
    cache = reader.init_cache(state)
    batch = place_batch(BATCH[:, :0], trainer.mesh, trainer.batch_partition_specs)
    assert reader.read(state, batch, cache) == (None, cache)
