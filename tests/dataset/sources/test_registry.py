"""One registry opens each kind of source, for training and for `prepare`."""

import json

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from xlstm_jax.dataset import (
    GrainArrayRecordsDataConfig,
    HFHubDataConfig,
    StandardLibraryDataConfig,
    TextDataConfig,
    TextFilesDataConfig,
)
from xlstm_jax.dataset.sources.registry import KINDS, open_paths, open_source
from xlstm_jax.dataset.sources.source import PathOptions, TextSource
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer

TEXTS = [f"Document {index}: " + "naïve " * (index % 7) for index in range(23)]
COMMON = {"global_batch_size": 2, "max_target_length": 16, "tokenizer_path": "byte"}


def text_files(folder):
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return TextFilesDataConfig(data_path=folder / "texts.jsonl", **COMMON), str(folder / "texts.jsonl")


def records(folder):
    (folder / "train").mkdir()
    writer = ArrayRecordWriter(str(folder / "train" / "texts_000000.arecord"), "group_size:1")
    for text in TEXTS:
        writer.write(text.encode())
    writer.close()
    return GrainArrayRecordsDataConfig(data_path=folder, **COMMON), str(folder)


def hugging_face(folder):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "saved"))
    return HFHubDataConfig(hf_path=folder / "saved", **COMMON), str(folder / "saved")


def standard_library(folder):
    del folder
    return StandardLibraryDataConfig(split="validation", **COMMON), "stdlib"


SOURCES = {
    "grain_arrayrecord": records,
    "huggingface_hub": hugging_face,
    "standard_library": standard_library,
    "text_files": text_files,
}


def open_path(path: str, split: str) -> TextSource:
    return open_paths([path], PathOptions(split, "text", "error", None))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets")
def test_training_and_prepare_read_the_same_documents(name, tmp_path):
    config, path = SOURCES[name](tmp_path)
    documents = open_source(config, "data").documents
    trained_on = [ByteTokenizer().decode(tokens) for tokens in documents.read(range(len(documents)))]
    prepared = [text for _, text in open_path(path, getattr(config, "split", "train")).documents()]
    assert trained_on == prepared
    assert name == "standard_library" or prepared == TEXTS


def test_these_are_all_kinds_of_sources():
    assert {kind.name for kind in KINDS} == set(SOURCES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:datasets")
@pytest.mark.parametrize("name", SOURCES)
def test_documents_continue_from_the_position_of_any_of_them(name, tmp_path):
    _, path = SOURCES[name](tmp_path)
    source = open_path(path, "validation" if name == "standard_library" else "train")
    position, text = list(source.documents())[7]
    assert next(source.documents(position)) == (position, text)


def test_a_config_without_documents_is_refused():
    with pytest.raises(ValueError, match="A TextDataConfig does not say where its documents are"):
        open_source(TextDataConfig(**COMMON), "data")
