"""A mixture gives each source its share of the tokens, at every step."""

import json

import numpy as np
import pytest
from dataset.corpora import ListedDocuments, random_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm_jax.dataset.background.workers import WorkerPool
from xlstm_jax.dataset.order.document_stream import DocumentStream, ReadDocuments
from xlstm_jax.dataset.order.mixture import Mixture, WeightSchedule
from xlstm_jax.dataset.sources.source import Source

LONGEST = 30
SOURCES = [Source(ListedDocuments(random_documents(seed, 40, LONGEST)), shuffle_seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(ReadDocuments(SOURCES), 0) as pool:
        yield pool


def make_mixture(pool, weights=None, at_steps=None):
    streams = [DocumentStream(SOURCES, index, pool) for index in range(len(SOURCES))]
    return Mixture(streams, WeightSchedule(len(SOURCES), weights, at_steps))


def tokens_drawn(mixture, count, step=0):
    totals = np.zeros(len(SOURCES))
    for _ in range(count):
        document = mixture.draw(step)
        totals[document.source] += len(document.tokens)
    return totals


@given(weights=st.lists(st.floats(0.01, 10), min_size=3, max_size=3), count=st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_no_source_is_off_its_share_by_more_than_two_documents(pool, weights, count):
    totals = tokens_drawn(make_mixture(pool, weights), count)
    assert np.abs(totals - totals.sum() * np.array(weights) / sum(weights)).max() <= 2 * LONGEST


def test_without_weights_all_sources_have_the_same_share(pool):
    totals = tokens_drawn(make_mixture(pool), 900)
    assert np.allclose(totals / totals.sum(), 1 / 3, atol=0.01)


def test_weights_change_at_the_steps_that_they_are_given_for(pool):
    mixture = make_mixture(pool, [1, 1, 0], {10: [0, 1, 3], 20: [1, 0, 0]})
    shares = [tokens_drawn(mixture, 500, step) for step in (0, 9, 10, 19, 20)]
    found = np.array([totals / totals.sum() for totals in shares])
    expected = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0.25, 0.75], [0, 0.25, 0.75], [1, 0, 0]]
    assert np.allclose(found, expected, atol=0.02)
    assert (found[np.array(expected) == 0] == 0).all()


def test_a_mixture_goes_on_from_its_state(pool):
    mixture = make_mixture(pool, [3, 2, 1])
    tokens_drawn(mixture, 77)
    state = json.loads(json.dumps(mixture.get_state()))
    expected = [mixture.draw(0)[:2] for _ in range(50)]
    other = make_mixture(pool, [3, 2, 1])
    other.set_state(state)
    assert [other.draw(0)[:2] for _ in range(50)] == expected


@pytest.mark.parametrize("weights", [[1, 2], [1, -1, 1], [0, 0, 0], [1, float("nan"), 1], [1, float("inf"), 1]])
def test_weights_that_make_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="must be 3 numbers"):
        WeightSchedule(3, weights)
    with pytest.raises(ValueError, match="from step 5 on"):
        WeightSchedule(3, [1, 1, 1], {5: weights})


def test_the_first_weights_are_given_once():
    with pytest.raises(ValueError, match="from step 1 on"):
        WeightSchedule(2, [1, 1], {0: [1, 2]})
