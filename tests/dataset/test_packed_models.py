"""A model computes for packed documents what it computes for each alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dataset.corpora import ListedDocuments
from tolerances import assert_close

from xlstm_jax.dataset.grain_batch_rampup import constant_rampup_schedule
from xlstm_jax.dataset.order.batches import BatchOrder, OrderedBatches
from xlstm_jax.dataset.sources.source import Source
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig

pytestmark = pytest.mark.slow

VOCAB, END, LENGTH = 20, 0, 16
SIZE = {"vocab_size": VOCAB, "embedding_dim": 16, "num_blocks": 2}
MODELS = {
    "mlstm": lambda: XLSTM(XLSTMConfig(**SIZE, num_heads=2, chunk_size=8)),
    "mixed": lambda: XLSTM(XLSTMConfig(**SIZE, num_heads=2, chunk_size=8, block_kinds=("mlstm_up", "slstm"))),
    "llama": lambda: LlamaTransformer(LlamaConfig(**SIZE, head_dim=8, mask_across_document_boundaries=True)),
}
RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(1, VOCAB, size) for size in (3, 40, 1, 9, 25, 16, 7, 5)]


@functools.cache
def ready(name):
    """Return a model with its parameters, as a jitted function."""
    model = MODELS[name]()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    return jax.jit(functools.partial(model.apply, variables), static_argnames=["return_state"])


def alone(name, index, start, stop):
    """Return the log-probabilities of some targets of a document under those targets, without anything around them."""
    tokens = np.append(DOCUMENTS[index], END)
    inputs = np.append(END, tokens[:-1])
    # What comes after a token does not change its logits, and one length is one program.
    padded = np.pad(inputs[start:stop], (0, -(stop - start) % LENGTH))
    logits = ready(name)(jnp.asarray(padded[None], jnp.int32))[0, : stop - start]
    scores = jax.nn.log_softmax(logits)[np.arange(stop - start), tokens[start:stop]]
    return {tuple(tokens[start:stop].tolist()): np.asarray(scores)}


def batches_of(packing):
    source = Source(ListedDocuments(DOCUMENTS), eod_token_id=END)
    order = BatchOrder(LENGTH, constant_rampup_schedule(2), packing, num_bins=2, is_endless=False, first_input=END)
    return list(OrderedBatches([source], order))


def pieces(logits, batch, row):
    """Yield targets and their log-probabilities for each document in a row."""
    scores = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch.targets[..., None], axis=-1)[..., 0]
    for number in range(1, batch.targets_segmentation[row].max() + 1):
        columns = batch.targets_segmentation[row] == number
        yield batch.targets[row, columns].tolist(), scores[row, columns]


@pytest.mark.parametrize("packing", ["first_fit", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_pieces_are_scored_as_separate_ones(name, packing):
    found = {}
    for batch in batches_of(packing):
        logits = ready(name)(
            jnp.asarray(batch.inputs),
            pos_idx=jnp.asarray(batch.inputs_position),
            document_borders=jnp.asarray(batch.get_document_borders()),
        )
        for row in range(len(batch.inputs)):
            found |= {tuple(targets): scores for targets, scores in pieces(logits, batch, row)}
    expected = {}
    for index, document in enumerate(DOCUMENTS):
        for start in range(0, len(document) + 1, LENGTH):
            expected |= alone(name, index, start, min(start + LENGTH, len(document) + 1))
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["mlstm", "mixed"])
def test_streams_with_a_carried_state_score_every_document_as_a_whole(name):
    state, found = None, {}
    open_documents = {row: ([], []) for row in range(2)}
    for batch in batches_of("stream"):
        logits, state = ready(name)(
            jnp.asarray(batch.inputs),
            pos_idx=jnp.asarray(batch.inputs_position),
            document_borders=jnp.asarray(batch.get_borders_of_streams()),
            state=state,
            return_state=True,
        )
        for row, (targets, scores) in open_documents.items():
            for more_targets, more_scores in pieces(logits, batch, row):
                targets += more_targets
                scores += more_scores.tolist()
                if targets[-1] == END:
                    found[tuple(targets)] = np.array(scores)
                    targets.clear()
                    scores.clear()
    expected = {}
    for index, document in enumerate(DOCUMENTS):
        expected |= alone(name, index, 0, len(document) + 1)
    assert max(map(len, expected)) > 2 * LENGTH
    assert_close(found, expected)
