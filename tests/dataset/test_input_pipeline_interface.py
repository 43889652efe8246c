"""A config is all it takes to get batches, from every kind of data, in one order on every mesh."""

import gzip
import json
import logging

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from dataset.corpora import random_documents
from meshes import make_mesh

from xlstm_jax.dataset import (
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    LLMBatch,
    StandardLibraryDataConfig,
    SyntheticDataConfig,
    TextFilesDataConfig,
    create_data_iterator,
    create_mixed_data_iterator,
)
from xlstm_jax.dataset.configs import DataConfig
from xlstm_jax.dataset.grain_data_processing import make_grain_iterator
from xlstm_jax.dataset.grain_transforms import ParseTokenizedArrayRecords
from xlstm_jax.dataset.input_pipeline_interface import get_process_loading_data
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.sources.standard_library import compressor_baselines, load_standard_library
from xlstm_jax.dataset.tokenizers.light import train_tokenizer

pytestmark = pytest.mark.slow

ROWS, LENGTH, END = 8, 16, 256
TEXTS = [f"Document {index}: " + "naïve " * (index % 7) for index in range(23)]
BATCHES = {"global_batch_size": ROWS, "max_target_length": LENGTH, "tokenizer_path": "byte", "worker_count": 0}
MESH = make_mesh(dp=2, fsdp=2)


def write_records(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def plain_text(folder):
    for index, text in enumerate(TEXTS):
        (folder / f"{index:02}.txt").write_text(text)
    return TextFilesDataConfig(data_path=folder, **BATCHES)


def json_lines(folder):
    with gzip.open(folder / "texts.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"content": text}) + "\n" for text in TEXTS)
    return TextFilesDataConfig(data_path=f"{folder}/*.jsonl.gz", data_column="content", **BATCHES)


def parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": TEXTS}), folder / "texts.parquet")
    return TextFilesDataConfig(data_path=folder / "texts.parquet", **BATCHES)


def hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "saved"))
    return HFHubDataConfig(hf_path=folder / "saved", **BATCHES)


def records_of_text(folder):
    write_records(folder / "train" / "texts_000000.arecord", [text.encode() for text in TEXTS[:9]])
    write_records(folder / "train" / "texts_000001.arecord", [text.encode() for text in TEXTS[9:]])
    return GrainArrayRecordsDataConfig(data_path=folder, **BATCHES)


def records_of_tokens(folder):
    records = [ParseTokenizedArrayRecords.sequence_to_bytestring(list(text.encode())) for text in TEXTS]
    write_records(folder / "train" / "texts_000000.arecord", records)
    return GrainArrayRecordsDataConfig(data_path=folder, tokenize_data=False, **BATCHES)


SOURCES = [plain_text, json_lines, parquet, hugging_face, records_of_text, records_of_tokens]


def change(config, **fields):
    return type(config)(**{**vars(config), **fields})


def host(batch):
    return jax.tree.map(np.asarray, batch)


def texts_in(batches):
    """Put the documents together again that lie in streams of bytes."""
    streams = [[] for _ in range(ROWS)]
    for batch in map(host, batches):
        for row, stream in enumerate(streams):
            stream += batch.targets[row, batch.targets_segmentation[row] > 0].tolist()
    rows = [bytes(token if token < END else 0 for token in stream).decode().split("\0") for stream in streams]
    return sorted(text for row in rows for text in row if text)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets")
def test_an_epoch_has_every_document_of_every_kind_of_source_once(source, tmp_path):
    iterator = create_data_iterator(change(source(tmp_path), packing="stream"), MESH)
    assert texts_in(iterator) == sorted(TEXTS)
    assert texts_in(iterator) == sorted(TEXTS)
    assert iterator.dataset_size == len(TEXTS)


def test_the_standard_library_needs_nothing_but_its_name_and_says_what_to_beat(caplog):
    options = BATCHES | {"packing": "first_fit", "max_steps_per_epoch": 2}
    train, validation = StandardLibraryDataConfig.create_train_eval_configs(**options)
    with caplog.at_level(logging.INFO):
        text = [texts_in(create_data_iterator(config, MESH)) for config in (train, validation)]
    assert all(text)
    assert text[0] != text[1]
    corpus = load_standard_library()
    assert corpus.sha256 in caplog.text
    assert f"gzip {compressor_baselines(corpus.validation)['gzip']:.3f}" in caplog.text


def test_synthetic_data_is_made_by_the_same_call():
    batch = next(create_data_iterator(SyntheticDataConfig(global_batch_size=ROWS, max_target_length=LENGTH), MESH))
    assert isinstance(batch, LLMBatch)


def test_batches_are_split_over_all_devices(tmp_path):
    batch = next(create_data_iterator(plain_text(tmp_path), MESH))
    assert isinstance(batch, LLMBatch)
    assert batch.inputs.shape == (ROWS, LENGTH)
    assert len({shard.device for shard in batch.inputs.addressable_shards}) == 4
    assert {shard.data.shape for shard in batch.inputs.addressable_shards} == {(2, LENGTH)}


def test_the_order_is_the_same_on_every_mesh_and_after_every_stop(tmp_path):
    (tmp_path / "other").mkdir()
    configs = [
        change(config, packing="first_fit", shuffle_data=True)
        for config in (plain_text(tmp_path / "other"), records_of_tokens(tmp_path))
    ]
    meshes = [MESH, make_mesh(dp=8), make_mesh(dp=1)]
    options = {"dataset_weights": [1, 3], "weights_at_steps": {4: [2, 1]}}
    whole = create_mixed_data_iterator(configs, MESH, **options)
    expected = [host(next(whole)) for _ in range(9)]
    found, state = [], None
    for mesh in meshes:
        iterator = create_mixed_data_iterator(configs, mesh, **options)
        if state is not None:
            iterator.set_state(json.loads(state))
        found += [host(next(iterator)) for _ in range(3)]
        state = json.dumps(iterator.get_state())
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(left, right)


def test_with_a_ramp_up_batches_grow_at_their_steps_and_no_token_is_lost(tmp_path):
    config = change(plain_text(tmp_path), packing="first_fit", batch_rampup_factors={2: 2.0, 3: 0.5})
    batches = [host(batch) for batch in create_data_iterator(config, MESH)]
    assert [len(batch.inputs) for batch in batches][:5] == [8, 8, 16, 4, 4]
    total = sum(int((batch.targets_segmentation > 0).sum()) for batch in batches)
    assert total == sum(len(text.encode()) + 1 for text in TEXTS)


def test_an_epoch_of_known_tokens_has_a_length_and_one_of_texts_ends_by_itself(tmp_path):
    (tmp_path / "texts").mkdir()
    endless = {"packing": "stream", "drop_remainder": True}
    texts = create_data_iterator(change(plain_text(tmp_path / "texts"), **endless), MESH)
    with pytest.raises(TypeError, match="no length"):
        len(texts)
    num_tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert 0 <= sum(1 for _ in texts) - num_tokens // (ROWS * LENGTH) <= 2
    unpacked = create_data_iterator(change(plain_text(tmp_path / "texts"), drop_remainder=True), MESH)
    assert len(unpacked) == len(TEXTS) // ROWS


def test_without_packing_only_an_epoch_that_keeps_its_remainder_reads_all_of_long_documents(tmp_path):
    config = plain_text(tmp_path)
    assert max(map(len, TEXTS)) > LENGTH
    parts, whole = (create_data_iterator(change(config, drop_remainder=drops), MESH) for drops in (True, False))
    assert sum(1 for _ in parts) == len(TEXTS) // ROWS
    assert sum(np.sum(host(batch).targets == END) for batch in whole) == len(TEXTS)


def test_validation_of_some_batches_sees_the_same_ones_every_time(tmp_path):
    iterator = create_data_iterator(change(plain_text(tmp_path), max_steps_per_epoch=2), MESH)
    first, second = ([host(batch).targets for batch in iterator] for _ in range(2))
    assert len(first) == 2
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("fields", [{"drop_remainder": True}, {"drop_remainder": False}], ids=str)
def test_a_cap_on_an_epoch_of_unknown_length_is_not_its_length(fields, tmp_path):
    config = change(plain_text(tmp_path), packing="stream", **fields)
    in_all = sum(1 for _ in create_data_iterator(config, MESH))
    for cap in (2, 1000):
        capped = create_data_iterator(change(config, max_steps_per_epoch=cap), MESH)
        with pytest.raises(TypeError, match="no length"):
            len(capped)
        assert sum(1 for _ in capped) == min(cap, in_all)


def test_a_cap_on_an_epoch_of_known_length_is_its_length_if_it_is_smaller(tmp_path):
    (tmp_path / "texts").mkdir()
    plain_text(tmp_path / "texts")
    prepare(tmp_path / "texts", tmp_path / "prepared", num_workers=0)
    options = BATCHES | {"tokenize_data": False, "packing": "stream", "drop_remainder": True}
    config = GrainArrayRecordsDataConfig(data_path=tmp_path / "prepared", **options)
    whole = len(create_data_iterator(config, MESH))
    for cap in (2, 1000):
        capped = create_data_iterator(change(config, max_steps_per_epoch=cap), MESH)
        assert len(capped) == sum(1 for _ in capped) == min(cap, whole)


def test_training_epochs_have_orders_of_their_own(tmp_path):
    iterator = create_data_iterator(change(plain_text(tmp_path), shuffle_data=True), MESH)
    first, second = ([host(batch).targets for batch in iterator] for _ in range(2))
    assert any((left != right).any() for left, right in zip(first, second, strict=False))


def test_a_state_of_other_texts_is_refused_with_the_difference(tmp_path):
    config = plain_text(tmp_path)
    iterator = create_data_iterator(config, MESH)
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    (tmp_path / "00.txt").write_text("something else")
    with pytest.raises(ValueError, match=r"sources\.0\.texts: \w+ in the state, \w+ here"):
        create_data_iterator(config, MESH).set_state(state)
    (tmp_path / "00.txt").write_text(TEXTS[0])
    create_data_iterator(config, MESH).set_state(state)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"", "nothing in it"), (b"\xff\xfe\xfa", "UTF-8")],
)
def test_bad_files_are_an_error_or_left_out(content, named, tmp_path, caplog):
    config = plain_text(tmp_path)
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad\.txt.*{named}"):
        create_data_iterator(config, MESH)
    with caplog.at_level(logging.WARNING):
        iterator = create_data_iterator(change(config, on_bad_data="skip", packing="stream"), MESH)
    assert texts_in(iterator) == sorted(TEXTS)
    assert "1" in caplog.text
    assert iterator.get_statistics()["skipped"] == 1


def test_a_shard_that_disappears_is_an_error_that_names_it_or_its_documents_are_left_out(tmp_path):
    config = change(records_of_text(tmp_path), packing="stream", worker_count=1)  # It opens files when it needs them.
    strict = create_data_iterator(config, MESH)
    lenient = create_data_iterator(change(config, on_bad_data="skip"), MESH)
    (tmp_path / "train" / "texts_000001.arecord").unlink()
    with pytest.raises(ValueError, match=r"texts_000001\.arecord"):
        list(strict)
    assert texts_in(lenient) == sorted(TEXTS[:9])
    assert lenient.get_statistics()["skipped"] == len(TEXTS) - 9


def test_the_processes_that_load_data_are_those_of_the_mesh_in_order():
    assert get_process_loading_data(SyntheticDataConfig(global_batch_size=8), MESH) == [0]
    with pytest.raises(ValueError, match="multiple of the 4 devices"):
        get_process_loading_data(SyntheticDataConfig(global_batch_size=6), MESH)


def test_all_processes_of_the_mesh_have_to_load_data(tmp_path):
    with pytest.raises(ValueError, match=r"all processes with devices in the mesh have to load data: \[0\]"):
        make_grain_iterator(plain_text(tmp_path), MESH, [0, 1])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_target_length": None}, "max_target_length is None"),
        ({"data_path": "no/such/folder"}, "no/such/folder"),
        ({"batch_rampup_factors": {2: 0.75}}, "From step 2 on, a batch has 6 rows"),
    ],
)
def test_configs_that_cannot_be_read_are_refused(fields, named, tmp_path):
    with pytest.raises(ValueError, match=named):
        create_data_iterator(change(plain_text(tmp_path), **fields), MESH)


def test_a_mixture_of_unlike_batches_is_refused(tmp_path):
    config = plain_text(tmp_path)
    with pytest.raises(ValueError, match=r"same max_target_length, but they have \[16, 17\]"):
        create_mixed_data_iterator([config, change(config, max_target_length=17)], MESH)


def test_a_config_without_data_is_refused():
    with pytest.raises(ValueError, match="no iterator for a DataConfig"):
        create_data_iterator(DataConfig(global_batch_size=8), MESH)


def test_long_documents_are_trained_on_to_their_end(tmp_path):
    long = random_documents(0, 1, max_length=1)[0].tolist() * 100
    write_records(tmp_path / "train" / "a_0.arecord", [ParseTokenizedArrayRecords.sequence_to_bytestring(long)])
    for packing in ("stream", "first_fit", "none"):
        config = GrainArrayRecordsDataConfig(data_path=tmp_path, tokenize_data=False, packing=packing, **BATCHES)
        batches = [host(batch) for batch in create_data_iterator(config, MESH)]
        assert sum(int((batch.targets_segmentation > 0).sum()) for batch in batches) == len(long) + 1


def test_tokens_that_were_prepared_are_not_read_as_texts(tmp_path):
    (tmp_path / "text").mkdir()
    plain_text(tmp_path / "text")
    prepare(tmp_path / "text", tmp_path / "prepared", num_workers=0)
    with pytest.raises(ValueError, match=r"prepared.*set tokenize_data=False"):
        create_data_iterator(GrainArrayRecordsDataConfig(data_path=str(tmp_path / "prepared"), **BATCHES), MESH)
    config = GrainArrayRecordsDataConfig(
        data_path=str(tmp_path / "prepared"), tokenize_data=False, packing="stream", **BATCHES
    )
    iterator = create_data_iterator(config, MESH)
    assert texts_in(iterator) == sorted(TEXTS)
    num_tokens = sum(len(text.encode()) + 1 for text in TEXTS)
    assert len(create_data_iterator(change(config, drop_remainder=True), MESH)) == num_tokens // (ROWS * LENGTH)


def test_a_mixture_of_different_tokens_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    config = plain_text(tmp_path / "texts")
    train_tokenizer(TEXTS, 300, tmp_path / "tokenizer")
    other = change(config, tokenizer_path=str(tmp_path / "tokenizer"))
    with pytest.raises(ValueError, match="must have the same tokens"):
        create_mixed_data_iterator([config, other], MESH)


def test_a_mixture_of_nothing_or_with_one_name_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no data set"):
        create_mixed_data_iterator([], MESH)
    config = plain_text(tmp_path)
    with pytest.raises(ValueError, match=r"different names, but they are called \['1', '1'\]"):
        create_mixed_data_iterator([change(config, name="1"), config], MESH)


def test_an_empty_text_is_no_document_also_where_special_tokens_are_added(tmp_path):
    write_records(tmp_path / "train" / "texts_000000.arecord", [b"some", b"", b"text"])
    options = BATCHES | {"add_bos": True, "packing": "none"}
    with pytest.raises(ValueError, match=r"Document 1 of .*train has no tokens"):
        list(create_data_iterator(GrainArrayRecordsDataConfig(data_path=tmp_path, **options), MESH))


def test_a_record_that_is_no_text_is_named_with_its_file(tmp_path):
    write_records(tmp_path / "train" / "texts_000000.arecord", [b"some", b"\xff\xfe"])
    with pytest.raises(ValueError, match=r"record 1 of .*texts_000000\.arecord is not UTF-8 text"):
        list(create_data_iterator(GrainArrayRecordsDataConfig(data_path=tmp_path, **BATCHES), MESH))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets")
def test_a_state_of_another_data_set_of_hugging_face_is_refused(tmp_path):
    datasets = pytest.importorskip("datasets")
    for name in "ab":
        texts = ["first", *[name * 3] * 5, "last"]
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / name))
    first, second = (create_data_iterator(HFHubDataConfig(hf_path=tmp_path / name, **BATCHES), MESH) for name in "ab")
    with pytest.raises(ValueError, match=r"sources\.0\.texts"):
        second.set_state(first.get_state())


def test_documents_end_only_with_a_token_that_the_tokenizer_has(tmp_path):
    (tmp_path / "texts").mkdir()
    tokenizer = train_tokenizer(TEXTS, 300, tmp_path / "tokenizer")
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    config = change(plain_text(tmp_path / "texts"), tokenizer_path=str(tokenizer))
    with pytest.raises(ValueError, match="no eos_token to end documents with: set add_eod=False"):
        create_data_iterator(config, MESH)
    batch = host(next(create_data_iterator(change(config, add_eod=False), MESH)))
    assert (batch.inputs[:, 0] == 0).all()
