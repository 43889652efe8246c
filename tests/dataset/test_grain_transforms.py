"""Each transform does what it says, on examples that fit on a line."""

import pickle

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from xlstm_jax.dataset import LLMBatch
from xlstm_jax.dataset.grain_transforms import (
    AddEODToken,
    CollateToBatch,
    HFNormalizeFeatures,
    HFPrefixTokenize,
    HFTokenize,
    InferSegmentations,
    PadToMaxLength,
    ParseArrayRecords,
    ParseTokenizedArrayRecords,
    ReformatLazyPacking,
    ReformatPacking,
    ShiftData,
    shift_and_refine,
    shift_left,
    shift_right,
)

SERIAL = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
E = 9
DOCUMENTS = [[1, 2, 3, E], [4, 5, E], [6, 7, E], [8, E]]


class Letters:
    """Calls like a tokenizer of Hugging Face: a letter is its place in the alphabet."""

    bos_token_id = 30
    eos_token_id = 31

    def __init__(self, truncation_side="right"):
        self.truncation_side = truncation_side

    def __call__(self, text, truncation=False, max_length=None, add_special_tokens=True):
        tokens = [ord(letter) - ord("a") + 1 for letter in text]
        if truncation:
            tokens = tokens[:max_length] if self.truncation_side == "right" else tokens[-max_length:]
        return {"input_ids": [0] * add_special_tokens + tokens}


class Plain(Letters):
    """Adds nothing of its own to a text."""

    def __call__(self, text, **options):
        return super().__call__(text, **{**options, "add_special_tokens": False})


class Endless(Plain):
    """Has no special tokens."""

    bos_token_id = eos_token_id = None


def assert_equal(data, **expected):
    """Compare arrays and dtypes under the given names, and the names themselves."""
    assert set(data) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(data[name], value, err_msg=name)
        assert data[name].dtype == np.int32, name


def rows_of(documents):
    rows = grain.MapDataset.source([{"text": document} for document in documents])
    return rows.map(HFNormalizeFeatures("text")).to_iter_dataset(SERIAL)


# The whole way.


def test_packed_documents_become_the_golden_batch():
    packed = grain.experimental.FirstFitPackIterDataset(
        rows_of(DOCUMENTS), length_struct={"inputs": 8, "targets": 8}, num_packing_bins=2
    )
    packed = packed.map(ReformatLazyPacking()).map(ShiftData(shift_target=False, eod_token_id=E, axis=0))
    (batch,) = packed.batch(2).map(CollateToBatch(LLMBatch))
    np.testing.assert_array_equal(batch.inputs, [[9, 1, 2, 3, 9, 4, 5, 9], [9, 6, 7, 9, 8, 9, 0, 0]])
    np.testing.assert_array_equal(batch.targets, [[1, 2, 3, 9, 4, 5, 9, 0], [6, 7, 9, 8, 9, 0, 0, 0]])
    for segmentation in (batch.inputs_segmentation, batch.targets_segmentation):
        np.testing.assert_array_equal(segmentation, [[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 0, 0, 0]])
    for position in (batch.inputs_position, batch.targets_position):
        np.testing.assert_array_equal(position, [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 0, 1, 0, 0, 0]])
    borders = batch.get_document_borders()
    np.testing.assert_array_equal(borders, [[1, 0, 0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1, 0, 0]])


def test_a_padded_document_becomes_the_golden_row():
    rows = rows_of(DOCUMENTS).map(PadToMaxLength(8)).map(ShiftData(shift_target=False, eod_token_id=E, axis=0))
    row = next(iter(rows.map(InferSegmentations(E))))
    np.testing.assert_array_equal(row["inputs"], [9, 1, 2, 3, 9, 0, 0, 0])
    np.testing.assert_array_equal(row["targets"], [1, 2, 3, 9, 0, 0, 0, 0])
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(row[f"{name}_segmentation"], [1, 1, 1, 1, 0, 0, 0, 0])
        np.testing.assert_array_equal(row[f"{name}_position"], [0, 1, 2, 3, 0, 0, 0, 0])


# Records.


def test_a_record_is_a_text():
    assert ParseArrayRecords("text").map("añ".encode()) == {"text": "añ"}
    with pytest.raises(UnicodeDecodeError):
        ParseArrayRecords("text").map(b"\xff")


def test_a_record_of_tokens_has_four_bytes_for_each_least_significant_first():
    record = ParseTokenizedArrayRecords.sequence_to_bytestring([1, 258])
    assert record == b"\x01\x00\x00\x00\x02\x01\x00\x00"
    assert ParseTokenizedArrayRecords("text").map(record) == {"text": [1, 258]}


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1)), st.booleans())
def test_tokens_come_back_from_their_record(tokens, as_array):
    sequence = np.array(tokens, np.int64) if as_array else tokens
    record = ParseTokenizedArrayRecords.sequence_to_bytestring(sequence)
    assert ParseTokenizedArrayRecords.bytestring_to_sequence(record) == tokens


def test_tokens_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2147483648 is not a token"):
        ParseTokenizedArrayRecords.sequence_to_bytestring(np.array([1, 2**31]))
    with pytest.raises(ValueError, match=r"record of 5 bytes holds no tokens .* tokenize_data=True"):
        ParseTokenizedArrayRecords.bytestring_to_sequence(b"abcde")


# Tokens.


@pytest.mark.parametrize(
    ("max_length", "tokens"), [(None, [1, 2, 3, 31]), (4, [1, 2, 3, 31]), (3, [1, 2, 3]), (2, [1, 2])]
)
def test_a_document_ends_with_the_end_if_there_is_room(max_length, tokens):
    assert HFTokenize(Plain, max_length=max_length).map({"text": "abc"}) == {"text": tokens}
    shortened = [1, 2, 3][:max_length]
    assert HFTokenize(Plain, max_length=max_length, add_eod=False).map({"text": "abc"}) == {"text": shortened}
    assert AddEODToken(31, max_length=max_length).map({"a": [1, 2, 3], "b": []}) == {"a": tokens, "b": [31]}
    assert AddEODToken(31, add_eod=False, max_length=max_length).map({"a": [1, 2, 3]}) == {"a": shortened}


def test_the_column_and_the_end_can_be_chosen():
    transform = HFTokenize(Plain, column_name="body", eod_token_id=7)
    assert transform.map({"body": "ab", "url": "z"}) == {"body": [1, 2, 7]}


def test_a_tokenizer_adds_its_own_special_tokens():
    assert HFTokenize(Letters).map({"text": "ab"}) == {"text": [0, 1, 2, 31]}


def test_a_tokenizer_is_made_once_and_not_before_the_first_text():
    made = []

    def create():
        made.append(True)
        return Plain()

    transform = HFTokenize(create)
    assert made == []
    transform.map({"text": "a"})
    transform.map({"text": "b"})
    assert made == [True]


def test_a_transform_without_a_tokenizer_yet_can_be_sent_to_a_worker():
    transform = pickle.loads(pickle.dumps(HFTokenize(Plain)))
    assert transform.map({"text": "a"}) == {"text": [1, 31]}


def test_a_tokenizer_without_an_end_needs_one():
    with pytest.raises(ValueError, match="no eos_token_id: set eod_token_id or add_eod=False"):
        HFTokenize(Endless).map({"text": "a"})
    assert HFTokenize(Endless, add_eod=False).map({"text": "a"}) == {"text": [1]}


def test_ending_a_document_leaves_the_given_one_alone():
    tokens = [1, 2]
    AddEODToken(31).map({"text": tokens})
    assert tokens == [1, 2]


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "inputs", "targets", "mask"),
    [
        (True, False, [30, 1, 2, 3], [1, 2, 3, 4], [0, 0, 1, 1]),
        (True, True, [30, 1, 2, 3, 4], [1, 2, 3, 4, 31], [0, 0, 1, 1, 1]),
        (False, False, [1, 2, 3], [2, 3, 4], [0, 1, 1]),
        (False, True, [1, 2, 3, 4], [2, 3, 4, 31], [0, 1, 1, 1]),
    ],
)
def test_only_the_text_after_a_prefix_is_predicted(add_bos, add_eos, inputs, targets, mask):
    transform = HFPrefixTokenize(Letters(), Letters(), add_bos_token=add_bos, add_eos_token=add_eos)
    assert_equal(
        transform.map({"prefix": "ab", "text": "cd"}),
        inputs=inputs,
        targets=targets,
        inputs_segmentation=[1] * len(inputs),
        targets_segmentation=mask,
    )


@settings(deadline=None)
@given(
    st.text("abc", max_size=5), st.text("abc", max_size=5), st.booleans(), st.booleans(), st.integers(1, 4) | st.none()
)
def test_masks_are_as_long_as_tokens(prefix, text, add_bos, add_eos, max_length):
    transform = HFPrefixTokenize(
        Letters(), Letters(), add_bos_token=add_bos, add_eos_token=add_eos, max_length=max_length
    )
    data = transform.map({"prefix": prefix, "text": text})
    assert len({array.shape for array in data.values()}) == 1
    is_prefix_scored = not add_bos and not prefix
    expected = len(text[:max_length]) + add_eos - is_prefix_scored
    assert data["targets_segmentation"].sum() == max(expected, 0)


def test_a_prefix_and_a_text_are_truncated_each_on_the_side_of_its_tokenizer():
    transform = HFPrefixTokenize(Letters(), Letters("left"), max_length=2, max_length_prefix=1)
    data = transform.map({"prefix": "abc", "text": "def"})
    np.testing.assert_array_equal(data["targets"], [3, 4, 5])


def test_columns_and_special_tokens_of_a_prefix_can_be_chosen_and_the_rest_passes_through():
    transform = HFPrefixTokenize(
        Endless(), Endless(), "question", "answer", add_eos_token=True, bos_token_id=20, eos_token_id=21
    )
    data = transform.map({"question": "a", "answer": "b", "document_idx": 5})
    np.testing.assert_array_equal(data["inputs"], [20, 1, 2])
    np.testing.assert_array_equal(data["targets"], [1, 2, 21])
    assert data["document_idx"] == 5
    assert {"question", "answer"}.isdisjoint(data)


def test_a_prefix_needs_the_special_tokens_that_it_is_to_have():
    with pytest.raises(ValueError, match="no bos_token_id: set bos_token_id or add_bos_token=False"):
        HFPrefixTokenize(Endless(), Endless())
    with pytest.raises(ValueError, match="no eos_token_id: set eos_token_id or add_eos_token=False"):
        HFPrefixTokenize(Endless(), Endless(), add_bos_token=False, add_eos_token=True)


# Rows.


def test_tokens_become_inputs_and_targets_of_their_own():
    data = HFNormalizeFeatures("text").map({"text": [1, 2], "other": [3]})
    assert_equal(data, inputs=[1, 2], targets=[1, 2])
    data["inputs"][0] = 5
    assert data["targets"][0] == 1


def test_the_results_of_both_packings_get_our_names():
    keys = ("inputs", "targets")
    tokens, segments, positions = (
        {key: np.full(2, i + 10 * j, np.int32) for j, key in enumerate(keys)} for i in range(3)
    )
    expected = {
        "inputs": [0, 0],
        "targets": [10, 10],
        "inputs_segmentation": [1, 1],
        "targets_segmentation": [11, 11],
        "inputs_position": [2, 2],
        "targets_position": [12, 12],
    }
    assert_equal(ReformatPacking.map((tokens, segments, positions)), **expected)
    lazy = {**tokens, **{f"{key}_segment_ids": segments[key] for key in keys}}
    assert_equal(ReformatLazyPacking.map({**lazy, **{f"{key}_positions": positions[key] for key in keys}}), **expected)


def test_a_document_is_padded_with_zeros():
    tokens = np.array([5, 6], np.int32)
    data = PadToMaxLength(4).map({"inputs": tokens, "targets": tokens})
    row, ones, positions = [5, 6, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]
    assert_equal(
        data,
        inputs=row,
        targets=row,
        inputs_segmentation=ones,
        targets_segmentation=ones,
        inputs_position=positions,
        targets_position=positions,
    )


def test_padding_leaves_longer_documents_and_other_entries_as_they_are():
    tokens = np.array([5, 6, 7], np.int32)
    data = PadToMaxLength(2).map({"inputs": tokens, "targets": tokens, "document_idx": np.int32(3)})
    np.testing.assert_array_equal(data["inputs"], tokens)
    np.testing.assert_array_equal(data["targets_position"], [0, 1, 2])
    assert data["document_idx"] == 3


# Shifts.


def test_arrays_shift_along_an_axis():
    x = np.array([[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(shift_right(x), [[0, 1, 2], [0, 4, 5]])
    np.testing.assert_array_equal(shift_right(x, padding_value=9), [[9, 1, 2], [9, 4, 5]])
    np.testing.assert_array_equal(shift_right(x, pad_by_first_element=True), [[1, 1, 2], [4, 4, 5]])
    np.testing.assert_array_equal(shift_right(x, axis=0, pad_by_first_element=True), [[1, 2, 3], [1, 2, 3]])
    np.testing.assert_array_equal(shift_left(x), [[2, 3, 0], [5, 6, 0]])
    np.testing.assert_array_equal(shift_left(x, axis=0, padding_value=9), [[4, 5, 6], [9, 9, 9]])


@settings(deadline=None)
@given(arrays.arrays(np.int32, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)), st.data())
def test_a_shift_changes_neither_shape_nor_the_given_array(x, data):
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    before = x.copy()
    for shifted in (shift_right(x, axis), shift_left(x, axis), shift_right(x, axis, pad_by_first_element=True)):
        assert (shifted.shape, shifted.dtype) == (x.shape, x.dtype)
    np.testing.assert_array_equal(x, before)


def unshifted():
    tokens, segmentation = np.array([[1, 2, 9, 3, 0]], np.int32), np.array([[1, 1, 1, 2, 0]], np.int32)
    return {
        "inputs": tokens,
        "targets": tokens,
        "inputs_segmentation": segmentation,
        "targets_segmentation": segmentation,
    }


def test_shifted_targets_take_their_segmentation_with_them():
    expected = {
        "inputs": [[1, 2, 9, 3, 0]],
        "targets": [[2, 9, 3, 0, 7]],
        "inputs_segmentation": [[1, 1, 1, 2, 0]],
        "targets_segmentation": [[1, 1, 2, 0, 0]],
    }
    assert_equal(ShiftData(eod_token_id=9, pad_token_id=7).map(unshifted()), **expected)
    assert_equal(shift_and_refine(unshifted(), padding_value=7), **expected)


def test_shifted_inputs_begin_with_the_end_and_leave_segmentations_alone():
    expected = {**unshifted(), "inputs": [[9, 1, 2, 9, 3]]}
    assert_equal(ShiftData(shift_target=False, eod_token_id=9, pad_token_id=7).map(unshifted()), **expected)
    assert_equal(shift_and_refine(unshifted(), shift_target=False, padding_value=9), **expected)


def test_shifting_leaves_the_given_dictionary_alone():
    data = unshifted()
    ShiftData().map(data)
    assert_equal(data, **unshifted())


# Segmentations.


def slow_segmentation(inputs, segmentation, is_row):
    """Walk along a row, document after document."""
    documents, positions = [], []
    document, position = (0 if len(inputs) and inputs[0] == E else 1), -1
    for token, is_token, is_in_row in zip(inputs, segmentation, is_row, strict=True):
        document, position = (document + 1, 0) if token == E else (document, position + 1)
        documents.append(document if is_token else 0)
        positions.append(position if is_in_row else 0)
    return documents, positions


@settings(deadline=None)
@given(
    st.integers(0, 3).flatmap(
        lambda n: st.lists(st.lists(st.sampled_from([0, 1, E]), min_size=n, max_size=n), min_size=1)
    ),
    st.integers(0, 4),
    st.booleans(),
)
def test_segmentations_are_those_of_a_slow_loop(rows, num_padding, is_batched):
    inputs = np.pad(np.array(rows, np.int32), ((0, 0), (0, num_padding)))
    masks = {"inputs": inputs[:, ::-1] != 1, "targets": inputs != 1}
    is_row = masks["inputs"] | masks["targets"]
    expected = [[slow_segmentation(*row) for row in zip(inputs, masks[name], is_row, strict=True)] for name in masks]
    select = slice(None) if is_batched else 0
    data = {"inputs": inputs[select], "targets": inputs[select]}
    data |= {f"{name}_segmentation": 5 * masks[name][select].astype(np.int32) for name in masks}
    result = InferSegmentations(E).map(data)
    assert result is data
    assert not np.shares_memory(data["inputs_position"], data["targets_position"])
    for name, rows_of_name in zip(masks, expected, strict=True):
        documents, positions = (np.array(part, np.int32) for part in zip(*rows_of_name, strict=True))
        np.testing.assert_array_equal(data[f"{name}_segmentation"], documents[select])
        np.testing.assert_array_equal(data[f"{name}_position"], positions[select])
        assert data[f"{name}_segmentation"].dtype == data[f"{name}_position"].dtype == np.int32


# Batches.


def test_a_dictionary_becomes_a_batch_also_under_other_names():
    data = PadToMaxLength(2).map({"inputs": np.array([1], np.int32), "targets": np.array([2], np.int32)})
    assert type(CollateToBatch(LLMBatch).map(data)) is LLMBatch
    data["tokens"] = data.pop("inputs")
    batch = CollateToBatch(LLMBatch, key_map={"tokens": "inputs"}).map(data)
    np.testing.assert_array_equal(batch.inputs, [1, 0])
    np.testing.assert_array_equal(batch.targets, [2, 0])
