"""Documents are drawn in an order that follows from the seed, and bad ones are an error or counted."""

import contextlib
import itertools

import numpy as np
import pytest
from dataset.corpora import FaultyDocuments, ListedDocuments, MissingDocuments

from xlstm_jax.dataset.background.workers import WorkerPool
from xlstm_jax.dataset.order import document_stream
from xlstm_jax.dataset.order.document_stream import DocumentStream, ReadDocuments
from xlstm_jax.dataset.sources.source import Source

NUMBER = 200  # more than are read at a time


@contextlib.contextmanager
def streaming(documents, num_workers=0, **options):
    sources = [Source(documents, **options)]
    with WorkerPool(ReadDocuments(sources), num_workers) as pool:
        yield DocumentStream(sources, 0, pool)


def numbered(count=NUMBER):
    return ListedDocuments([[index + 1] for index in range(count)])


def draw(stream, count):
    return [int(stream.draw().tokens[0]) for _ in range(count)]


def test_without_a_seed_documents_keep_their_order_pass_after_pass():
    with streaming(numbered(3)) as stream:
        assert draw(stream, 7) == [1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize("few", [2**16, 1])
def test_every_pass_has_all_documents_once_in_an_order_of_its_own(few, monkeypatch):
    monkeypatch.setattr(document_stream, "_MAX_STORED_PERMUTATION", few)
    document_stream._order_of_pass.cache_clear()
    with streaming(numbered(), shuffle_seed=4) as stream:
        passes = [draw(stream, NUMBER) for _ in range(3)]
    assert all(sorted(order) == list(range(1, NUMBER + 1)) for order in passes)
    assert len({tuple(order) for order in passes}) == 3


def test_another_seed_is_another_order():
    orders = []
    for seed in (4, 5):
        with streaming(numbered(), shuffle_seed=seed) as stream:
            orders.append(draw(stream, NUMBER))
    assert orders[0] != orders[1]


def test_a_stream_goes_on_from_any_position():
    with streaming(numbered(), shuffle_seed=4) as stream:
        order = draw(stream, 2 * NUMBER)
        stream.seek(150)
        assert draw(stream, 100) == order[150:250]
        assert stream.position == 250


def test_documents_are_fetched_by_position_without_a_change_of_what_comes_next():
    with streaming(numbered(), shuffle_seed=4) as stream:
        order = draw(stream, 10)
        found = stream.fetch([7, 2])
        assert {position: int(document.tokens[0]) for position, document in found.items()} == {7: order[7], 2: order[2]}
        assert stream.position == 10


def test_the_end_of_a_document_is_its_last_token():
    with streaming(ListedDocuments([[5, 6]]), eod_token_id=9) as stream:
        assert stream.draw().tokens.tolist() == [5, 6, 9]


def test_nothing_is_drawn_beyond_a_limit():
    with streaming(numbered(5)) as stream:
        assert draw(stream, 5) == [1, 2, 3, 4, 5]
        assert stream.draw(limit=5) is None
        assert stream.draw(limit=10).position == 5


@pytest.mark.parametrize("bad", ["empty", "unreadable"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_bad_documents_are_left_out_and_counted_if_that_is_asked_for(bad, num_workers):
    rows = [[1], [], [2], [3]]
    documents = ListedDocuments(rows) if bad == "empty" else FaultyDocuments([[1], [9], [2], [3]], faulty={1})
    with streaming(documents, num_workers, on_bad_data="skip") as stream:
        assert draw(stream, 6) == [1, 2, 3, 1, 2, 3]
        assert stream.num_skipped == 2


def test_an_empty_document_is_an_error_that_says_which_and_what_to_do():
    with (
        streaming(ListedDocuments([[1], []]), location="books.txt") as stream,
        pytest.raises(ValueError, match=r"Document 1 of books\.txt has no tokens.*on_bad_data=\"skip\""),
    ):
        draw(stream, 2)


def test_an_unreadable_document_is_an_error():
    with (
        streaming(FaultyDocuments([[1], [2]], faulty={1})) as stream,
        pytest.raises(ValueError, match=r"shard_1\.arecord is gone"),
    ):
        draw(stream, 2)


def test_a_source_without_any_token_is_an_error_and_not_an_endless_search():
    with (
        streaming(ListedDocuments([[], []]), on_bad_data="skip") as stream,
        pytest.raises(ValueError, match="None of the 2 documents"),
    ):
        stream.draw()


def test_a_source_without_documents_is_an_error():
    with pytest.raises(ValueError, match="There are no documents in the data"), streaming(ListedDocuments([])):
        pass


def test_a_document_that_has_changed_is_not_fetched():
    documents = ListedDocuments([[1], np.zeros(0, np.int32)])
    with streaming(documents, on_bad_data="skip") as stream, pytest.raises(ValueError, match="data has changed"):
        stream.fetch([1])


@pytest.mark.parametrize(("length", "most"), [(1, 1024), (2**18, 2)])
def test_as_many_documents_are_read_at_a_time_as_have_some_tokens_together(length, most):
    asked = []

    class Spied(ListedDocuments):
        def read(self, indices):
            asked.append(len(indices))
            return super().read(indices)

    with streaming(Spied([np.ones(length)] * 3)) as stream:
        for _ in range(3000 if length == 1 else 40):
            stream.draw()
    assert asked[0] == 2  # The length is not known yet.
    assert all(after <= 2 * before for before, after in itertools.pairwise(asked))
    assert asked[-1] == most


def test_nothing_is_read_beyond_a_limit():
    asked = []

    class Spied(ListedDocuments):
        def read(self, indices):
            asked.extend(indices)
            return super().read(indices)

    with streaming(Spied([[1]] * 20)) as stream:
        while stream.draw(limit=20) is not None:
            pass
    assert sorted(asked) == list(range(20))


def test_a_document_whose_file_is_missing_is_left_out_only_where_nobody_else_could_read_it():
    documents = MissingDocuments([[1], [2], [3]], faulty={1})
    with streaming(documents, on_bad_data="skip") as stream:
        assert draw(stream, 2) == [1, 3]
    with (
        streaming(documents, on_bad_data="skip", skips_unreadable=False) as stream,
        pytest.raises(ValueError, match="shard_1"),
    ):
        draw(stream, 2)


def test_after_an_error_the_same_documents_come_again():
    documents = FaultyDocuments([[index + 1] for index in range(9)], faulty={4})
    with streaming(documents) as stream:
        found = []
        with pytest.raises(ValueError, match="shard_4"):
            found.extend(draw(stream, 1) for _ in range(9))
        position = stream.position
        with pytest.raises(ValueError, match="shard_4"):
            draw(stream, 9)
        documents.faulty.clear()
        stream.seek(position)
        assert draw(stream, 9 - position) == list(range(position + 1, 10))
