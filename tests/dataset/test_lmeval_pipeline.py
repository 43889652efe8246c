"""Requests become batches of similar lengths, shared out to hosts, each request once."""

from types import SimpleNamespace

import grain
import numpy as np
import pytest
from meshes import make_mesh

from xlstm_jax.dataset.batch import LLMIndexedBatch
from xlstm_jax.dataset.lmeval_pipeline import (
    CompleteLLMIndexedBatch,
    MultihostSortedRemapDataset,
    PadBatchDataset,
    PadSequenceInBatchDataset,
    ParseLMEval,
    SortedDataset,
    _pad_batch_multiple,
    empty_llm_indexed_sample,
    lmeval_preprocessing_pipeline,
    token_length,
)

END = 256


def request(*args):
    return SimpleNamespace(args=args)


def dataset(*elements):
    return grain.MapDataset.source(list(elements))


def batches_of(requests, hosts=1, batch_size=8, **options):
    """Return the batches of each host on the eight devices that all of them have here."""
    options = {"padding_multiple": 4, "worker_count": 0, "tokenizer_path": "byte"} | options
    loaders = [
        lmeval_preprocessing_pipeline(host, hosts, make_mesh(dp=8 // hosts), requests, batch_size, **options)
        for host in range(hosts)
    ]
    return [list(loader) for loader in loaders]


def random_requests(number):
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 40, (number, 2))
    return [request("p" * prefix, "t" * text) for prefix, text in lengths]


def test_a_request_is_a_row_whose_continuation_counts():
    ((batch,),) = batches_of([request("ab", "cd"), request("xyz")])
    assert isinstance(batch, LLMIndexedBatch)
    assert batch.inputs.tolist() == [[END, *b"abc"], [END, *b"xy", 0], *[[0] * 4] * 6]
    assert batch.targets.tolist() == [[*b"abcd"], [*b"xyz", 0], *[[0] * 4] * 6]
    assert batch.inputs_segmentation.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], *[[0] * 4] * 6]
    assert batch.targets_segmentation.tolist() == [[0, 0, 1, 1], [1, 1, 1, 0], *[[0] * 4] * 6]
    assert batch.inputs_position[:2].tolist() == [[0, 1, 2, 3], [0, 1, 2, 0]]
    assert batch.document_idx.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert batch.sequence_idx.tolist() == [0] * 8


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_every_request_is_in_exactly_one_batch_of_one_host(hosts):
    requests = random_requests(77)
    rows = [row for batches in batches_of(requests, hosts) for batch in batches for row in zip_rows(batch)]
    documents = [document for document, *_ in rows]
    assert sorted(filter(None, documents)) == list(range(1, 78))
    for document, text in rows:
        if document:
            prefix, continuation = requests[document - 1].args
            assert text == prefix + continuation


def zip_rows(batch):
    """Return the document of each row, with its text."""
    for document, inputs, targets, segmentation in zip(
        batch.document_idx.tolist(),
        np.asarray(batch.inputs),
        np.asarray(batch.targets),
        np.asarray(batch.inputs_segmentation),
        strict=True,
    ):
        is_input = segmentation != 0
        assert inputs[is_input][:1].tolist() in ([], [END])
        yield document, bytes(targets[is_input].tolist()).decode()


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_have_as_many_batches_of_nearly_the_same_lengths(hosts):
    requests = [request("x" * length) for length in np.random.default_rng(0).permutation(77) + 1]
    per_host = batches_of(requests, hosts, padding_multiple=1)
    assert {len(batches) for batches in per_host} == {10}
    for step, batches in enumerate(zip(*per_host, strict=True)):
        assert [batch.inputs.shape[1] for batch in batches] == [77 - 8 * step - host for host in range(hosts)]


def test_the_longest_batches_come_first_and_have_no_more_columns_than_they_need():
    (batches,) = batches_of(random_requests(30))
    columns = [batch.inputs.shape[1] for batch in batches]
    needed = [int(np.max(np.sum(batch.inputs_segmentation != 0, axis=1))) for batch in batches]
    assert columns == sorted(columns, reverse=True)
    assert [length % 4 for length in columns] == [0] * 4
    assert all(length - need < 4 for length, need in zip(columns, needed, strict=True))


def test_a_batch_of_empty_requests_has_columns_too():
    ((batch,),) = batches_of([request("", "")])
    assert batch.inputs.shape == (8, 4)
    assert not batch.targets_segmentation.any()
    assert batch.document_idx.tolist()[0] == 1


def test_tokens_around_documents_can_be_given():
    ((batch,),) = batches_of([request("ab", "cd")], bos_token_id=7, eos_token_id=ord("b"))
    assert batch.inputs[0].tolist() == [7, *b"abc"]
    assert batch.inputs_segmentation[0].tolist() == [1, 1, 2, 2]
    assert batch.inputs_position[0].tolist() == [0, 1, 0, 1]
    assert batch.targets_segmentation[0].tolist() == [0, 0, 2, 2]


def test_the_tokenizer_is_loaded_with_what_belongs_to_it(monkeypatch):
    def load(*args, **kwargs):
        assert args == ("some/path",)
        assert kwargs == {"add_bos": False, "add_eos": False, "hf_access_token": "secret", "cache_dir": "folder"}
        return lambda text, **_: {"input_ids": list(text.encode())}

    monkeypatch.setattr("xlstm_jax.dataset.lmeval_pipeline.load_tokenizer", load)
    options = {"hf_access_token": "secret", "tokenizer_cache_dir": "folder", "bos_token_id": 1, "eos_token_id": 2}
    ((batch,),) = batches_of([request("ab", "cd")], tokenizer_path="some/path", **options)
    assert batch.inputs[0].tolist() == [1, *b"abc"]


@pytest.mark.parametrize("options", [{"worker_count": 2}, {"worker_count": 2, "use_thread_prefetch": True}], ids=str)
def test_batches_prepared_ahead_are_the_same(options):
    requests = random_requests(20)
    (expected,), (found,) = batches_of(requests), batches_of(requests, worker_buffer_size=2, **options)
    assert len(expected) == len(found) == 3
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one.document_idx, other.document_idx)
        np.testing.assert_array_equal(one.inputs, other.inputs)


def test_a_loader_knows_its_length():
    loader = lmeval_preprocessing_pipeline(0, 1, make_mesh(), random_requests(9), 4, "byte", worker_count=0)
    assert (len(loader), loader.dataset_size) == (3, 9)


def test_batches_that_hosts_cannot_share_are_refused():
    with pytest.raises(ValueError, match="global_batch_size 8 is not a multiple of the 3 hosts"):
        lmeval_preprocessing_pipeline(0, 3, make_mesh(), random_requests(9), 8, "byte")


# The parts.


def test_the_texts_of_a_request_take_its_place():
    assert ParseLMEval().map({"idx": 3, "req": request("a ", "b")}) == {"idx": 3, "prefix": "a", "text": " b"}
    assert ParseLMEval("other").map({"other": request("a")}) == {"prefix": "", "text": "a"}


def test_a_row_is_completed_with_positions_and_indices():
    tokens = np.array([5, 6], np.int32)
    row = CompleteLLMIndexedBatch.map({"idx": 4, "inputs": tokens, "targets": tokens})
    assert {name: array.tolist() for name, array in row.items()} == {
        "inputs": [5, 6],
        "targets": [5, 6],
        "inputs_position": [0, 1],
        "targets_position": [0, 1],
        "document_idx": 4,
        "sequence_idx": 0,
    }


def test_an_empty_row_has_the_fields_of_a_batch_and_no_tokens():
    row = empty_llm_indexed_sample()
    assert LLMIndexedBatch(**row).document_idx == 0
    assert token_length(row) == 0


@pytest.mark.parametrize(("multiple_of", "min_length", "length"), [(4, 0, 4), (3, 0, 3), (2, 5, 6), (1, 7, 7)])
def test_elements_are_appended_until_there_are_enough(multiple_of, min_length, length):
    padded = PadBatchDataset(dataset(1, 2, 3), multiple_of, min_length, pad_elem=0)
    assert list(padded) == [1, 2, 3] + [0] * (length - 3)


def test_rows_of_a_batch_are_padded_to_one_length():
    rows = dataset(*({"x": np.arange(n, dtype=np.int32), "n": np.array(n)} for n in (3, 5, 1)))
    first, last = PadSequenceInBatchDataset(rows, batch_size=2, multiple_of=4, pad_value=-1)
    assert first["x"].tolist() == [[0, 1, 2, -1, -1, -1, -1, -1], [0, 1, 2, 3, 4, -1, -1, -1]]
    assert last["x"].tolist() == [[0, -1, -1, -1], [-1] * 4]
    assert (first["n"].tolist(), last["n"].tolist()) == ([3, 5], [1, -1])


def test_arrays_are_padded_along_the_axis_that_is_asked_for():
    padded = _pad_batch_multiple([np.ones((2, 3)), np.ones((2, 1))], multiple_of=2, axis=2, batch_size_pad=3)
    assert padded.shape == (3, 2, 4)
    assert padded.sum(axis=(1, 2)).tolist() == [6, 2, 0]


def test_elements_are_sorted_and_equal_ones_stay_in_their_order():
    words = dataset("bb", "a", "cc", "ddd")
    assert list(SortedDataset(words, key=len)) == ["a", "bb", "cc", "ddd"]
    assert list(SortedDataset(words, key=len, reverse=True)) == ["ddd", "bb", "cc", "a"]


def test_hosts_take_turns_in_drawing_from_each_global_batch():
    dealt = MultihostSortedRemapDataset(grain.MapDataset.range(12), global_batch_size=6, dataloader_host_count=2)
    assert list(dealt[:6]) == [0, 2, 4, 6, 8, 10]
    assert list(dealt[6:]) == [1, 3, 5, 7, 9, 11]


@pytest.mark.parametrize(("length", "batch_size"), [(12, 5), (10, 4)])
def test_what_cannot_be_dealt_out_evenly_is_refused(length, batch_size):
    with pytest.raises(ValueError, match="PadBatchDataset appends elements"):
        MultihostSortedRemapDataset(grain.MapDataset.range(length), batch_size, dataloader_host_count=2)
