"""Rows hold all tokens of all documents once, in order, and say where each is from."""

import itertools
import json

import numpy as np
import pytest
from dataset.corpora import random_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm_jax.dataset.packing.first_fit import FirstFitPacking
from xlstm_jax.dataset.packing.rows import Piece, make_batch
from xlstm_jax.dataset.packing.stream import StreamPacking
from xlstm_jax.dataset.sources.source import Document

END = 999_999
LENGTH = 8
PACKINGS = {
    "stream": lambda: StreamPacking(LENGTH),
    "first_fit": lambda: FirstFitPacking(LENGTH, num_bins=3),
    "none": lambda: FirstFitPacking(LENGTH, num_bins=0),
}
of_packings = pytest.mark.parametrize("name", PACKINGS)
some_documents = st.integers(0, 10_000).map(lambda seed: documents_of(random_documents(seed, 25)))


def documents_of(rows):
    return [Document(0, index, np.append(row, END).astype(np.int32)) for index, row in enumerate(rows)]


def fill_all(packing, documents, row_counts=(4,)):
    """Return the batches of a pass; the number of rows goes through `row_counts` and stays at the last."""
    waiting = iter(documents)
    batches = []
    while True:
        num_rows = row_counts[min(len(batches), len(row_counts) - 1)]
        rows = packing.fill(num_rows, lambda: next(waiting, None))
        assert len(rows) == num_rows
        if not any(rows):
            return batches
        batches.append(rows)


def targets_by_document(batches):
    """Collect the targets of each document from the pieces, in the order in which they were laid out."""
    found = {}
    for rows in batches:
        for row in rows:
            for document, start, stop, _ in row:
                found.setdefault(document.position, []).append((start, document.tokens[start:stop]))
    return {
        position: np.concatenate([tokens for _, tokens in sorted(pieces, key=lambda piece: piece[0])])
        for position, pieces in found.items()
    }


@of_packings
@given(documents=some_documents, row_counts=st.lists(st.integers(1, 6), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_every_token_of_every_document_is_a_target_exactly_once(name, documents, row_counts):
    found = targets_by_document(fill_all(PACKINGS[name](), documents, row_counts))
    assert sorted(found) == [document.position for document in documents]
    for document in documents:
        assert found[document.position].tolist() == document.tokens.tolist()


@of_packings
@given(documents=some_documents)
@settings(max_examples=20, deadline=None)
def test_no_row_is_longer_than_it_may_be(name, documents):
    sizes = [
        sum(piece.stop - piece.start for piece in row) for rows in fill_all(PACKINGS[name](), documents) for row in rows
    ]
    assert max(sizes) <= LENGTH


@given(documents=some_documents)
@settings(max_examples=20, deadline=None)
def test_a_streamed_document_goes_on_where_its_row_has_ended(documents):
    batches = fill_all(StreamPacking(LENGTH), documents)
    for before, after in itertools.pairwise(batches):
        for row, follower in zip(before, after, strict=True):
            if row and row[-1].stop < len(row[-1].document.tokens):
                assert follower[0][:2] == (row[-1].document, row[-1].stop)
                assert follower[0].origin == row[-1].origin
                assert row[-1].stop - row[-1].start == LENGTH - sum(piece.stop - piece.start for piece in row[:-1])


def test_streams_are_padded_only_once_there_are_no_more_documents():
    documents = iter(documents_of(random_documents(1, 400)))
    packing = StreamPacking(LENGTH)
    for _ in range(50):
        rows = packing.fill(4, lambda: next(documents))
        assert all(sum(piece.stop - piece.start for piece in row) == LENGTH for row in rows)


def test_first_fit_fills_rows_well():
    rng = np.random.default_rng(0)
    documents = iter(documents_of([np.ones(size) for size in rng.integers(5, 200, 5000)]))
    packing = FirstFitPacking(512, num_bins=8)
    rows = [row for _ in range(60) for row in packing.fill(8, lambda: next(documents))]
    assert np.mean([sum(piece.stop - piece.start for piece in row) for row in rows]) / 512 > 0.95


def test_first_fit_takes_the_first_row_with_room_and_finishes_the_fullest():
    sizes = [5, 6, 3, 7, 2]  # the end of a document is one more
    documents = iter(documents_of([np.ones(size - 1) for size in sizes]))
    packing = FirstFitPacking(LENGTH, num_bins=2)
    rows = packing.fill(4, lambda: next(documents, None))
    # 5 and 6 open both rows, 3 fits the first and fills it, 7 takes its place, 2 fits the second.
    assert [[len(piece.document.tokens) for piece in row] for row in rows] == [[5, 3], [7], [6, 2], []]


@of_packings
def test_a_packing_goes_on_from_its_state_at_any_batch(name):
    documents = documents_of(random_documents(3, 40))
    for num_batches in range(12):
        waiting = iter(documents)
        packing = PACKINGS[name]()
        for _ in range(num_batches):
            packing.fill(3, lambda waiting=waiting: next(waiting, None))
        state = json.loads(json.dumps(packing.get_state()))
        rest = list(waiting)
        other = PACKINGS[name]()
        other.set_state(state, lambda source, position: documents[position])
        assert fill_all(other, rest, [3]) == fill_all(packing, rest, [3])


@pytest.mark.parametrize(
    ("name", "sizes", "row_counts", "part"),
    [
        ("stream", [30] * 4, [4, 1], "homeless"),
        ("first_fit", [30], [1], "rest"),
        ("first_fit", [5, 5, 5], [1], "finished"),
    ],
)
def test_a_state_has_the_documents_that_wait_for_a_row(name, sizes, row_counts, part):
    documents = documents_of([np.arange(size) for size in sizes])
    waiting = iter(documents)
    packing, other = PACKINGS[name](), PACKINGS[name]()
    for num_rows in row_counts:
        packing.fill(num_rows, lambda: next(waiting, None))
    state = json.loads(json.dumps(packing.get_state()))
    assert any(state[part])
    other.set_state(state, lambda source, position: documents[position])
    assert fill_all(other, [], [1]) == fill_all(packing, [], [1])


def test_a_batch_is_what_its_documentation_shows():
    first, second = documents_of([[1, 2, 3], [4, 5]])
    waiting = iter([first, second])
    rows = FirstFitPacking(LENGTH, num_bins=1).fill(1, lambda: next(waiting, None))
    batch = make_batch(rows, LENGTH, first_input=END)
    assert batch.inputs.tolist() == [[END, 1, 2, 3, END, 4, 5, 0]]
    assert batch.targets.tolist() == [[1, 2, 3, END, 4, 5, END, 0]]
    assert batch.inputs_segmentation.tolist() == batch.targets_segmentation.tolist() == [[1, 1, 1, 1, 2, 2, 2, 0]]
    assert batch.inputs_position.tolist() == batch.targets_position.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch.get_document_borders().tolist() == [[True, False, False, False, True, False, False, True]]


def test_no_input_is_from_another_document():
    (document,) = documents_of([[1, 2, 3]])
    other = Document(0, 1, np.array([7, 8], np.int32))  # has no end
    batch = make_batch([[Piece(other, 0, 2, 0), Piece(document, 0, 4, 0)]], LENGTH, first_input=0)
    assert batch.inputs.tolist() == [[0, 7, 0, 1, 2, 3, 0, 0]]


def test_a_piece_that_goes_on_has_the_token_before_it_as_its_first_input():
    (document,) = documents_of([range(1, 12)])
    rows = StreamPacking(LENGTH), iter([document])
    batches = [make_batch(rows[0].fill(1, lambda: next(rows[1], None)), LENGTH, 0) for _ in range(2)]
    assert batches[1].inputs.tolist() == [[8, 9, 10, 11, 0, 0, 0, 0]]
    assert batches[1].targets.tolist() == [[9, 10, 11, END, 0, 0, 0, 0]]
    assert batches[1].inputs_position.tolist() == [[8, 9, 10, 11, 0, 0, 0, 0]]


def test_a_cut_piece_counts_its_positions_from_its_own_beginning():
    (document,) = documents_of([range(1, 12)])
    waiting = iter([document])
    rows = FirstFitPacking(LENGTH, num_bins=1).fill(2, lambda: next(waiting, None))
    batch = make_batch(rows, LENGTH, first_input=0)
    assert batch.inputs_position.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 0, 0, 0, 0]]


def test_where_a_row_goes_away_its_document_goes_on_as_if_it_began_there():
    documents = iter(documents_of([np.arange(1, 8), np.arange(11, 31)]))  # The first one fills its row to the end.
    packing = StreamPacking(LENGTH)
    packing.fill(2, lambda: next(documents, None))
    batch = make_batch(packing.fill(1, lambda: next(documents, None)), LENGTH, first_input=0)
    assert batch.inputs.tolist() == [list(range(18, 26))]
    assert batch.inputs_position.tolist() == [list(range(8))]
    assert batch.get_borders_of_streams()[0, 0]
    after = make_batch(packing.fill(1, lambda: next(documents, None)), LENGTH, first_input=0)
    assert after.inputs_position[0, 0] == 8
    assert not after.get_borders_of_streams()[0, 0]


@pytest.mark.parametrize("num_bins", [0, 3])
def test_the_state_of_a_cut_document_does_not_grow_with_it(num_bins):
    (document,) = documents_of([np.ones(100_000)])
    waiting = iter([document])
    packing = FirstFitPacking(LENGTH, num_bins)
    packing.fill(4, lambda: next(waiting, None))
    assert len(json.dumps(packing.get_state())) < 200
