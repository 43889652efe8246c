"""How much text a set holds, whether it is stored as text or as tokens, and what compressors make of it."""

import gzip
import lzma

import pytest

from xlstm_jax.dataset.configs import GrainArrayRecordsDataConfig, TextFilesDataConfig
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.sources.text_measures import measure_text

TEXTS = ["Ein Satz mit Umlauten: äöü. " * 20, "Another text, " * 30, "x"]


@pytest.fixture
def source(tmp_path):
    """A folder with a file for each text."""
    (tmp_path / "texts").mkdir()
    for index, text in enumerate(TEXTS):
        (tmp_path / f"texts/{index}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "texts"


def test_bytes_and_tokens_are_counted_with_the_ends_of_documents(source):
    config = TextFilesDataConfig(data_path=source, tokenizer_path="byte", global_batch_size=8, max_target_length=16)
    measures = measure_text(config, max_bytes=10**6)
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (measures.num_bytes, measures.num_tokens) == (num_bytes, num_bytes + 3)
    assert measures.bytes_per_token == num_bytes / (num_bytes + 3)
    content = "".join(TEXTS).encode()
    assert measures.compressors["gzip"] == 8 * len(gzip.compress(content, 9, mtime=0)) / len(content)
    assert set(measures.compressors) == {"gzip", "xz"}


def test_tokens_on_disk_measure_the_same_as_the_text_they_were_made_of(source, tmp_path):
    manifests = prepare(source, tmp_path / "out", train_vocab_size=300, num_workers=0)
    config = GrainArrayRecordsDataConfig(
        data_path=tmp_path / "out",
        tokenize_data=False,
        tokenizer_path=str(tmp_path / "out/tokenizer"),
        global_batch_size=8,
        max_target_length=16,
    )
    measures = measure_text(config, max_bytes=10**6)
    assert measures.num_bytes == sum(len(text.encode()) for text in TEXTS)
    assert measures.num_tokens == manifests["train"].num_tokens + 3


def test_primed_xz_has_read_the_training_text_and_plain_xz_has_not(source):
    training = TextFilesDataConfig(data_path=source, tokenizer_path="byte", global_batch_size=8, max_target_length=16)
    measures = measure_text(training, 10**6, training=[training], max_training_bytes=10**6)
    content = "".join(TEXTS).encode()
    primed = 8 * (len(lzma.compress(content * 2, preset=9)) - len(lzma.compress(content, preset=9))) / len(content)
    assert measures.compressors["primed xz"] == primed
    assert primed < measures.compressors["xz"] / 2  # It has seen this very text.


def test_xz_is_not_primed_with_a_part_of_the_training_text(source):
    config = TextFilesDataConfig(data_path=source, tokenizer_path="byte", global_batch_size=8, max_target_length=16)
    measures = measure_text(config, 10**6, training=[config, config], max_training_bytes=1000)
    assert set(measures.compressors) == {"gzip", "xz"}


def test_of_a_large_set_the_first_documents_are_measured_and_nothing_is_compressed(source):
    config = TextFilesDataConfig(data_path=source, tokenizer_path="byte", global_batch_size=8, max_target_length=16)
    measures = measure_text(config, max_bytes=10)
    assert not measures.is_whole
    assert measures.compressors == {}
    assert measures.num_bytes == len(TEXTS[0].encode())
