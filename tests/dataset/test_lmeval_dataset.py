"""Requests become rows in which each token of a text is a target once, and no other token ever."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xlstm_jax.dataset.batch import LLMIndexedBatch
from xlstm_jax.dataset.lmeval_dataset import (
    HFTokenizeLogLikelihood,
    HFTokenizeLogLikelihoodRolling,
    document_tokens,
    split_request,
)

END = 256


def request(*args):
    return SimpleNamespace(args=args)


def rows_of(*requests, **options):
    """Return the rows of requests, whose tokens are bytes."""
    rows = HFTokenizeLogLikelihoodRolling("byte", **{"max_length": 8} | options).map([request(*r) for r in requests])
    return [rows[index] for index in range(len(rows))]


def scored(rows):
    """Return the targets that count, with the inputs up to each, by document."""
    found = {}
    for row in rows:
        for column in np.flatnonzero(row["targets_segmentation"]):
            seen = (row["inputs"][: column + 1].tolist(), int(row["targets"][column]))
            found.setdefault(int(row["document_idx"]), []).append(seen)
    return found


def test_a_continuation_is_the_target_of_its_context():
    (row,) = rows_of(("ab", "cd"))
    expected = {
        "inputs": [END, *b"abc", 0, 0, 0, 0],
        "targets": [*b"abcd", 0, 0, 0, 0],
        "inputs_segmentation": [1, 1, 1, 1, 0, 0, 0, 0],
        "targets_segmentation": [0, 0, 1, 1, 0, 0, 0, 0],
        "inputs_position": [0, 1, 2, 3, 0, 0, 0, 0],
        "targets_position": [0, 1, 2, 3, 0, 0, 0, 0],
        "document_idx": 1,
        "sequence_idx": 0,
    }
    assert {name: array.tolist() for name, array in row.items()} == expected
    assert {array.dtype for array in row.values()} == {np.dtype(np.int32)}


def test_rows_have_the_fields_of_a_batch():
    (row,) = rows_of(("ab", "cd"))
    assert LLMIndexedBatch(**row).inputs.shape == (8,)


def test_a_document_without_context_is_predicted_from_its_first_token_on():
    assert scored(rows_of(("abc",))) == {1: [([END], 97), ([END, 97], 98), ([END, 97, 98], 99)]}


def test_windows_follow_each_other_and_the_last_one_is_full():
    rows = rows_of(("abcdefghij",), max_length=4)
    assert [bytes(row["targets"].tolist()) for row in rows] == [b"abcd", b"efgh", b"ghij"]
    assert [row["inputs"].tolist() for row in rows] == [[END, *b"abc"], [*b"defg"], [*b"fghi"]]
    assert [row["targets_segmentation"].tolist() for row in rows] == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]]
    assert [int(row["sequence_idx"]) for row in rows] == [0, 1, 2]


def test_windows_of_context_alone_are_left_out():
    (row,) = rows_of(("abcdefghijkl", "mn"), max_length=4)
    assert row["inputs"].tolist() == [*b"jklm"]
    assert row["targets_segmentation"].tolist() == [0, 0, 1, 1]
    assert row["sequence_idx"] == 0


TEXT = st.text("xyz", max_size=20)


@settings(deadline=None, derandomize=True)
@given(TEXT, TEXT, st.integers(1, 9), st.booleans(), st.booleans())
def test_each_token_of_a_text_is_a_target_once_with_what_came_before_it_and_no_other_is(
    prefix, text, length, add_bos, add_eos
):
    rows = rows_of((prefix, text), max_length=length, add_bos_token=add_bos, add_eos_token=add_eos)
    before = [END] * add_bos + [*prefix.encode()]
    tokens = [*before, *text.encode()] + [END] * add_eos
    first = max(len(before), 1)  # Nothing comes before the first of all tokens.
    start_of_last_window = max(len(tokens) - length - 1, 0)
    found = scored(rows).get(1, [])
    assert [target for _, target in found] == tokens[first:]
    for position, (seen, _) in enumerate(found, start=first):
        assert seen == tokens[position - len(seen) : position]
        assert len(seen) >= max(position - start_of_last_window, 1)


def test_a_request_without_targets_has_a_row_too():
    rows = rows_of(("", ""), ("abcdefghij", ""), add_bos_token=False)
    assert [int(row["document_idx"]) for row in rows] == [1, 2]
    assert scored(rows) == {}


def test_rows_of_document_0_fill_up_the_last_batch():
    rows = rows_of(("a",), ("bcdefghijkl",), ("d",), batch_size=3)
    assert [(int(row["document_idx"]), int(row["sequence_idx"])) for row in rows] == [
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (0, 0),
        (0, 0),
    ]
    assert not any(array.any() for array in rows[-1].values())


def test_tokens_around_documents_can_be_given():
    (row,) = rows_of(("a", "b"), add_eos_token=True, bos_token_id=7, eos_token_id=9)
    assert (row["inputs"][:3].tolist(), row["targets"][:3].tolist()) == ([7, 97, 98], [97, 98, 9])
    assert row["targets_segmentation"][:4].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("args", "prefix", "text"),
    [
        (("a b", " c"), "a b", " c"),
        (("a b ", "c"), "a b", " c"),
        (("a\n\n", "c "), "a", "\n\nc "),
        (("", "c"), "", "c"),
        (("  a ",), "", "  a "),
    ],
)
def test_white_space_at_the_end_of_a_context_goes_to_the_continuation(args, prefix, text):
    assert split_request(request(*args)) == {"prefix": prefix, "text": text}


def test_texts_of_requests_are_a_data_set():
    texts = HFTokenizeLogLikelihood.map([request("a", "b"), request("c")])
    assert list(texts) == [{"prefix": "a", "text": "b"}, {"prefix": "", "text": "c"}]


@pytest.mark.parametrize(
    ("of_tokenizer", "given_tokens", "expected"),
    [
        ((1, 2), (None, None), (1, 2)),
        ((1, 2), (3, None), (3, 2)),
        ((1, 2), (None, 0), (1, 0)),
        ((None, 2), (None, None), (2, 2)),
        ((1, None), (None, None), (1, 1)),
    ],
)
def test_documents_begin_and_end_with_given_tokens_or_those_of_the_tokenizer(of_tokenizer, given_tokens, expected):
    tokenizer = SimpleNamespace(bos_token_id=of_tokenizer[0], eos_token_id=of_tokenizer[1])
    assert document_tokens(tokenizer, *given_tokens) == expected


def test_a_tokenizer_without_any_token_to_begin_with_is_refused():
    with pytest.raises(ValueError, match="neither a bos_token_id nor an eos_token_id"):
        document_tokens(SimpleNamespace(bos_token_id=None, eos_token_id=None))


def test_the_tokenizer_is_loaded_with_what_belongs_to_it(monkeypatch):
    calls = []

    def load(*args, **kwargs):
        calls.append((args, kwargs))
        return SimpleNamespace(bos_token_id=1, eos_token_id=2)

    monkeypatch.setattr("xlstm_jax.dataset.lmeval_dataset.load_tokenizer", load)
    HFTokenizeLogLikelihoodRolling("some/path", 8, hf_access_token="secret", tokenizer_cache_dir="folder")
    HFTokenizeLogLikelihoodRolling("some/path", 8)
    options = {"add_bos": False, "add_eos": False}
    assert calls == [
        (("some/path",), {**options, "hf_access_token": "secret", "cache_dir": "folder"}),
        (("some/path",), {**options, "hf_access_token": None, "cache_dir": None}),
    ]
