"""Files of documents become rows of tokens, and every token is a target."""

import itertools
import json
import sys

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from meshes import make_mesh

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset import HFHubDataConfig
from xlstm_jax.dataset.grain_data_processing import (
    PaddedDataset,
    load_array_record_dataset,
    load_huggingface_dataset,
    pad_dataset,
    preprocess_dataset,
)
from xlstm_jax.dataset.grain_iterator import make_grain_multihost_iterator

pytestmark = pytest.mark.slow

END = 256
"""The end of a document, for the tokenizer of bytes."""


def preprocess(documents, *, host=0, num_hosts=1, **options):
    defaults = {
        "data_column_name": "text",
        "tokenize": True,
        "global_batch_size": 4,
        "max_target_length": 5,
        "shuffle": False,
        "data_shuffle_seed": 1,
        "tokenizer_path": "byte",
        "add_bos": False,
        "add_eos": False,
        "num_epochs": 1,
    }
    return preprocess_dataset(host, num_hosts, documents, **{**defaults, **options})


def rows_of(documents, **options):
    rows, _ = preprocess(documents, **options)
    return list(rows)


def text(length):
    return bytes(97 + index % 26 for index in range(length))


def pieces_of(tokens, length=5, end=END):
    """The inputs and targets of a document that ends with its last token, cut by hand."""
    tokens = list(tokens)
    pairs = list(zip([end, *tokens[:-1]], tokens, strict=True))
    return [tuple(map(list, zip(*pairs[i : i + length], strict=True))) for i in range(0, len(pairs), length)]


def segments_of(rows):
    """The inputs and targets of every segment of every row."""
    found = []
    for row in rows:
        segmentation = row["targets_segmentation"]
        assert row["inputs_segmentation"].tolist() == segmentation.tolist()
        for segment in sorted(set(segmentation[segmentation > 0].tolist())):
            columns = segmentation == segment
            assert row["targets_position"][columns].tolist() == list(range(columns.sum()))
            found.append((row["inputs"][columns].tolist(), row["targets"][columns].tolist()))
    return found


def write_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def to_record(tokens):
    return np.array(tokens, "<i4").tobytes()


@pytest.mark.parametrize("grain_packing", [False, True])
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 14), min_size=1, max_size=8), shuffle=st.booleans())
def test_every_token_of_every_document_and_its_end_is_a_target_once_an_epoch(lengths, shuffle, grain_packing):
    documents = [text(length) for length in lengths]
    rows = rows_of(documents, grain_packing=grain_packing, shuffle=shuffle)
    expected = [piece for document in documents for piece in pieces_of([*document, END])]
    segments = segments_of(rows)
    if shuffle or grain_packing:
        segments, expected = sorted(segments), sorted(expected)
    assert segments == expected
    assert {len(row["targets"]) for row in rows} == {5}


def test_a_document_that_is_cut_goes_on_with_the_token_before():
    rows = rows_of([b"abcdefgh", b"xy"], max_target_length=4)
    assert [row["targets"].tolist() for row in rows] == [[*b"abcd"], [*b"efgh"], [END, 0, 0, 0], [*b"xy", END, 0]]
    assert [row["inputs"].tolist() for row in rows] == [[END, *b"abc"], [*b"defg"], [*b"h", 0, 0, 0], [END, *b"xy", 0]]


def test_pieces_are_packed_with_other_documents():
    rows = rows_of([b"abcdef", b"xy"], max_target_length=6, grain_packing=True)
    assert [row["targets"].tolist() for row in rows] == [[*b"abcdef"], [END, *b"xy", END, 0, 0]]
    assert rows[1]["inputs"].tolist() == [*b"f", END, *b"xy", 0, 0]
    assert rows[1]["inputs_segmentation"].tolist() == [1, 2, 2, 2, 0, 0]
    assert rows[1]["inputs_position"].tolist() == [0, 0, 1, 2, 0, 0]


def test_as_many_rows_are_filled_at_a_time_as_asked_for():
    documents = [b"abc", b"def", b"g"]
    options = {"grain_packing": True, "max_target_length": 6, "shuffle": False}
    one, two = (rows_of(documents, grain_packing_bin_count=count, **options) for count in (1, 2))
    assert [row["targets"].tolist() for row in one] == [[*b"abc", END, 0, 0], [*b"def", END, *b"g", END]]
    assert [row["targets"].tolist() for row in two] == [[*b"abc", END, *b"g", END], [*b"def", END, 0, 0]]


def test_records_of_files_are_texts_or_tokens(tmp_path):
    texts = ["grün", "straße", "x"]
    write_records(tmp_path / "text_000000.arecord", [text.encode() for text in texts])
    segments = segments_of(rows_of(load_array_record_dataset(tmp_path)))
    assert segments == [piece for text in texts for piece in pieces_of([*text.encode(), END])]

    documents = [[70000, 3], [5], list(range(1, 12))]
    write_records(tmp_path / "tokens_000000.other", map(to_record, documents))
    source = load_array_record_dataset(tmp_path, ".other")
    segments = segments_of(rows_of(source, tokenize=False, tokenizer_path=None, eod_token_id=0))
    assert segments == [piece for tokens in documents for piece in pieces_of([*tokens, 0], end=0)]


def test_a_column_can_hold_texts_or_tokens_among_other_columns():
    documents = [{"text": "abc", "tokens": [1, 2], "id": 7}, {"text": "d", "tokens": [3], "id": 8}]
    assert segments_of(rows_of(documents)) == pieces_of([*b"abc", END]) + pieces_of([*b"d", END])
    segments = segments_of(rows_of(documents, data_column_name="tokens", tokenize=False))
    assert segments == pieces_of([1, 2, END]) + pieces_of([3, END])


def test_special_tokens_are_added_where_asked_for():
    options = {"max_target_length": 9, "eod_token_id": 5}
    (row,) = rows_of([b"ab"], add_bos=True, add_eos=True, **options)
    assert row["targets"].tolist() == [256, *b"ab", 256, 5, 0, 0, 0, 0]
    assert row["inputs"][:5].tolist() == [5, 256, *b"ab", 256]
    (row,) = rows_of([b"ab"], add_eod=False, **options)
    assert row["targets"].tolist() == [*b"ab", 0, 0, 0, 0, 0, 0, 0]


def test_without_ends_packed_documents_still_do_not_see_each_other():
    (row,) = rows_of([b"ab", b"cd"], add_eod=False, grain_packing=True)
    assert row["inputs"].tolist() == [END, *b"a", END, *b"c", 0]
    assert row["targets"].tolist() == [*b"abcd", 0]


def test_without_packing_an_end_within_a_document_begins_a_segment():
    (row,) = rows_of([to_record([1, 9, 2, 3])], tokenize=False, eod_token_id=9)
    assert row["targets"].tolist() == [1, 9, 2, 3, 9]
    assert row["targets_segmentation"].tolist() == [1, 1, 2, 2, 2]


@pytest.mark.parametrize("grain_packing", [False, True])
def test_without_a_shift_inputs_are_targets(grain_packing):
    rows = rows_of([b"abcdef"], shift=False, grain_packing=grain_packing)
    for name in ("inputs", "targets"):
        assert [row[name].tolist() for row in rows] == [[*b"abcde"], [*b"f", END, 0, 0, 0]]
        assert rows[1][f"{name}_segmentation"].tolist() == [1, 1, 0, 0, 0]


def test_each_host_reads_its_part_for_as_many_epochs_as_asked_for():
    documents = [bytes([letter]) for letter in b"abcde"]
    tokens = [
        [int(row["targets"][0]) for row in rows_of(documents, host=host, num_hosts=2, num_epochs=2)] for host in (0, 1)
    ]
    assert tokens == [[*b"abcabc"], [*b"dede"]]
    endless, _ = preprocess(documents, num_epochs=None)
    assert [int(row["targets"][0]) for row in itertools.islice(endless, 12)] == [*b"abcdeabcdeab"]


def test_empty_documents_have_nothing_to_predict():
    documents = [b"a", b"", b"b"]
    rows = rows_of(documents, add_bos=True, add_eos=True)
    assert [row["targets_segmentation"].any() for row in rows] == [True, False, True]
    assert not rows[1]["targets"].any()
    (row,) = rows_of(documents, grain_packing=True, max_target_length=4)
    assert row["targets"].tolist() == [*b"a", END, *b"b", END]
    assert row["targets_segmentation"].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("documents", [[b"a"] * 5, [{"text": "a", "id": 3}] * 5])
def test_a_remainder_that_is_kept_is_filled_up_with_empty_rows(documents):
    rows, source = preprocess(documents, drop_remainder=False)
    assert len(source) == 8
    assert [int(row["targets_segmentation"].sum()) for row in rows] == [2] * 5 + [0] * 3
    for options in ({"drop_remainder": True}, {"drop_remainder": False, "grain_packing": True}):
        _, source = preprocess(documents, **options)
        assert len(source) == 5


@pytest.mark.parametrize(("steps", "expected"), [(1, 4), (2, 8), (3, 10)])
def test_an_epoch_has_at_most_the_steps_that_are_asked_for_and_the_next_one_goes_on(steps, expected):
    documents = [bytes([letter]) for letter in b"abcdefghij"]
    rows, source = preprocess(documents, max_steps_per_epoch=steps)
    assert [source[index] for index in range(len(source))] == documents[:expected]
    assert [int(row["targets"][0]) for row in rows] == [*b"abcdefghij"]


def test_data_that_cannot_be_read_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match="has no documents"):
        preprocess([])
    with pytest.raises(ValueError, match="no column 'text', but content, id"):
        preprocess([{"content": "a", "id": 1}])
    with pytest.raises(ValueError, match="tokenizer_path is None: texts need a tokenizer"):
        preprocess([b"a"], tokenizer_path=None, eod_token_id=0)
    with pytest.raises(ValueError, match="tokens without an eod_token_id"):
        preprocess([to_record([1])], tokenize=False, tokenizer_path=None)


def test_a_tokenizer_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr("xlstm_jax.dataset.tokenizers.light.ByteTokenizer.eos_token_id", None)
    with pytest.raises(ValueError, match=r"The tokenizer 'byte' has no token for the end .* set eod_token_id"):
        preprocess([b"a"])
    assert rows_of([b"a"], eod_token_id=3)[0]["targets"].tolist() == [*b"a", 3, 0, 0, 0]


def iterator_of(**options):
    documents = [text(length) for length in (3, 17, 1, 8, 12, 5, 9, 30)]
    rows, source = preprocess(documents, num_epochs=None, shuffle=True, global_batch_size=2, **options)
    return lambda worker_count: make_grain_multihost_iterator(
        rows, len(source), make_mesh(dp=2), 2, dataloading_host_count=1, worker_count=worker_count
    )


def take(iterator, count):
    batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(iterator)), count)
    return [(batch.inputs.tolist(), batch.targets_segmentation.tolist()) for batch in batches]


@pytest.mark.parametrize("grain_packing", [False, True])
def test_an_iterator_that_stops_within_a_document_goes_on_with_its_next_piece(grain_packing):
    make = iterator_of(grain_packing=grain_packing)
    whole, states = [], []
    iterator = make(0)
    for _ in range(9):
        states.append(json.dumps(iterator.get_state()))
        whole += take(iterator, 1)
    for stop in (3, 4):
        restored = make(0)
        restored.set_state(json.loads(states[stop]))
        assert take(restored, 5) == whole[stop : stop + 5]


def test_a_worker_tokenizes_and_cuts_as_its_parent_would():
    make = iterator_of(grain_packing=True)
    first, second = make(1), make(1)
    whole = take(make(0), 7)
    assert take(first, 3) == whole[:3]
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert take(second, 4) == whole[3:]


def test_a_data_set_is_padded_with_documents_of_its_kind():
    padded = pad_dataset([b"ab", b"c", b"d"], 2, "text")
    assert len(padded) == 4
    assert list(padded) == [b"ab", b"c", b"d", b""]
    assert padded[-1] == padded.empty_sequence == b""
    with pytest.raises(IndexError):
        padded[4]
    assert len(pad_dataset([b"ab", b"c"], 2, "text")) == 2
    assert pad_dataset([{"text": "ab", "id": 1}], 2, "text")[1] == {"text": ""}
    assert pad_dataset([{"tokens": [1, 2]}], 2, "tokens")[1] == {"tokens": []}
    assert list(PaddedDataset([b"ab", b"c"], 1, "text")) == [b"ab"]


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in ("000010", "9", "000002", "100"):
        write_records(tmp_path / f"part_{number}.arecord", [number.encode()])
    (tmp_path / "README.md").write_text("Not a record.")
    source = load_array_record_dataset(str(tmp_path))
    assert [source[index] for index in range(len(source))] == [b"000002", b"9", b"000010", b"100"]


def test_folders_without_numbered_files_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=rf"no folder {tmp_path / 'train'}, to read files \*_NNNNNN.arecord from"):
        load_array_record_dataset(tmp_path / "train")
    with pytest.raises(ValueError, match=rf"folder {tmp_path} has no files \*_NNNNNN.arecord"):
        load_array_record_dataset(tmp_path)
    write_records(tmp_path / "train.arecord", [b"a"])
    with pytest.raises(ValueError, match=r"train.arecord must end with the number of its shard, \*_NNNNNN.arecord"):
        load_array_record_dataset(tmp_path)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets")


def hf_config(path, **options):
    return HFHubDataConfig(hf_path=path, global_batch_size=2, **options)


def test_a_data_set_that_was_saved_is_read_from_its_folder(datasets, tmp_path):
    train, validation = (datasets.Dataset.from_dict({"text": texts, "id": [1]}) for texts in (["abc"], ["d"]))
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=train, validation=validation).save_to_disk(str(tmp_path / "both"))
    assert load_huggingface_dataset(hf_config(tmp_path / "one"))["text"][:] == ["abc"]
    loaded = load_huggingface_dataset(hf_config(str(tmp_path / "both"), split="validation"))
    assert loaded["text"][:] == ["d"]
    assert segments_of(rows_of(loaded)) == pieces_of([*b"d", END])
    for split in ("test", None):
        with pytest.raises(ValueError, match=rf"split is {split!r}, but must be one of .*both: train, validation"):
            load_huggingface_dataset(hf_config(tmp_path / "both", split=split))


def test_a_saved_data_set_without_splits_is_no_validation_set(datasets, tmp_path):
    datasets.Dataset.from_dict({"text": ["abc"]}).save_to_disk(str(tmp_path / "one"))
    with pytest.raises(ConfigError, match=r"split is 'validation', but .*one holds one data set without splits"):
        load_huggingface_dataset(hf_config(tmp_path / "one", split="validation"))
    datasets.Dataset.from_dict({"text": ["d"]}, split="validation").save_to_disk(str(tmp_path / "named"))
    assert load_huggingface_dataset(hf_config(tmp_path / "named", split="validation"))["text"][:] == ["d"]


def test_a_data_set_is_loaded_from_files_with_all_options(datasets, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "abc"}\n{"text": "d"}\n')
    options = {"hf_data_files": "a.jsonl", "hf_cache_dir": tmp_path / "cache"}
    loaded = load_huggingface_dataset(hf_config(tmp_path / "data", split="train[:1]", **options))
    assert loaded["text"][:] == ["abc"]

    asked = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: asked.update(options, path=path) or loaded)
    config = hf_config(
        "org/name", hf_data_dir="sub", split="test", hf_num_data_processes=3, hf_access_token="secret", **options
    )
    assert load_huggingface_dataset(config) is loaded
    assert asked == {
        "path": "org/name",
        "data_dir": "sub",
        "data_files": "a.jsonl",
        "split": "test",
        "num_proc": 3,
        "token": "secret",
        "cache_dir": str(tmp_path / "cache"),
    }


def test_without_datasets_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "xlstm_jax\[hf\]"'):
        load_huggingface_dataset(hf_config("org/name"))
