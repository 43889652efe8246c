"""Documents to prepare, and readers of what was written."""

import json

import pytest
from array_record.python import array_record_module

from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer

TEXTS = [f"Document {number}: " + "words and more words " * (number % 7) for number in range(300)]
KILOBYTE = 1 / 1024


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def prepare_here(source, output, **options):
    """Prepare in this process, in shards of two kilobytes of text."""
    return prepare(source, output, **{"num_workers": 0, "shard_megabytes": 2 * KILOBYTE, **options})


def read_texts(folder):
    shards = TokenShards(folder)
    return [ByteTokenizer().decode(tokens) for tokens in shards.read(range(len(shards)))]


def content_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def write_records(file, records):
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def save_dataset(folder, **columns):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk(folder)
    return folder
