"""All documents are written once, in their order and in the same bytes whatever the number of workers."""

import re

import pytest
from dataset.prepare.helpers import TEXTS, content_of, prepare_here, read_texts, write_records

from xlstm_jax.dataset.prepare import groups, prepare
from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.dataset.shards.token_shards import TokenShards, verify
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder


def test_all_documents_are_written_in_their_order(source, output):
    manifest = prepare_here(source, output)["train"]
    assert read_texts(output / "train") == TEXTS
    assert manifest.num_documents == len(TEXTS)
    assert manifest.num_tokens == sum(len(text.encode()) for text in TEXTS)
    verify(output / "train")


def test_the_manifest_says_how_the_tokens_were_made(source, output):
    prepare_here(source, output, add_bos=True)
    manifest = read_manifest(output / "train")
    assert (manifest.tokenizer_path, manifest.vocab_size, manifest.eod_token_id) == ("byte", 257, 256)
    assert manifest.tokenizer_digest == TextEncoder("byte", add_bos=True).digest
    assert (manifest.add_bos, manifest.add_eos) == (True, False)
    assert manifest.source["paths"] == [str(source)]
    assert TokenShards(output / "train").read([0])[0][0] == 256


def test_shards_have_the_size_that_was_asked_for(source, output):
    manifest = prepare_here(source, output)["train"]
    assert len(manifest.shards) > 5
    assert all(2048 <= shard.num_tokens < 2048 + 200 for shard in manifest.shards[:-1])
    assert [shard.file for shard in manifest.shards[:2]] == ["train_000000.arecord", "train_000001.arecord"]


def test_shards_of_tiny_documents_have_no_more_than_some(source, output, monkeypatch):
    monkeypatch.setattr(groups, "_MAX_SHARD_DOCUMENTS", 100)
    manifest = prepare_here(source, output, shard_megabytes=None)["train"]
    assert [shard.num_documents for shard in manifest.shards] == [100, 100, 100]


def test_any_number_of_workers_writes_the_same_bytes(source, tmp_path):
    contents = []
    for num_workers in (0, 1, 3):
        prepare_here(source, tmp_path / str(num_workers), num_workers=num_workers)
        contents.append(content_of(tmp_path / str(num_workers) / "train"))
    assert contents[0] == contents[1] == contents[2]


def test_several_paths_are_one_source(source, tmp_path, output):
    (tmp_path / "more.txt").write_text("more\n")
    prepare_here([tmp_path / "more.txt", source], output)
    assert read_texts(output / "train") == ["more\n", *TEXTS]


def test_long_files_of_plain_text_are_cut(tmp_path, output):
    (tmp_path / "book.txt").write_text("a line of the book\n" * 100)
    prepare_here(tmp_path / "book.txt", output, max_document_bytes=200)
    texts = read_texts(output / "train")
    assert "".join(texts) == "a line of the book\n" * 100
    assert max(map(len, texts)) == 190


def test_an_output_that_would_be_read_as_a_source_is_refused(source, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"lies in the source {tmp_path}")):
        prepare_here(tmp_path, tmp_path / "output")


@pytest.mark.parametrize("pattern", ["raw", "ra*", "raw/../raw"])
def test_an_output_below_a_source_is_refused_however_the_source_is_named(tmp_path, pattern):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="lies in the source"):
        prepare_here(tmp_path / pattern, tmp_path / "raw" / "output")


def test_text_may_lie_beside_what_is_written(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    prepare_here(tmp_path / "a.txt", tmp_path)
    assert read_texts(tmp_path / "train") == ["text"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("way", ["folder", "link", "pattern"])
def test_a_source_that_lies_where_the_output_is_written_is_refused_and_stays(tmp_path, overwrite, way):
    write_records(tmp_path / "data" / "train" / "x_000000.arecord", [b"text"])
    before = content_of(tmp_path / "data" / "train")
    (tmp_path / "link").symlink_to(tmp_path / "data" / "train")
    source = {"folder": "data/train", "link": "link", "pattern": "data/train/*"}[way]
    with pytest.raises(ValueError, match=r"lies where the output .* is written"):
        prepare_here(tmp_path / source, tmp_path / "data", overwrite=overwrite)
    assert content_of(tmp_path / "data" / "train") == before


def test_a_file_that_is_a_link_to_what_is_written_is_refused(source, output, tmp_path):
    prepare_here(source, output)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "a.txt").symlink_to(output / "train" / "manifest.json")
    with pytest.raises(ValueError, match=r"lies where the output .* is written"):
        prepare_here(tmp_path / "links", output, overwrite=True)


@pytest.mark.parametrize("name", ["shard_megabytes", "train_megabytes"])
@pytest.mark.parametrize("value", [-1, 0, 1e-9, float("nan"), float("inf")])
def test_sizes_that_are_none_are_refused(source, output, name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, but must be"):
        prepare_here(source, output, **{name: value})


def test_no_sources_are_refused(output):
    with pytest.raises(ValueError, match="sources is empty"):
        prepare([], output, num_workers=0)


def test_a_negative_number_of_workers_is_refused(source, output):
    with pytest.raises(ValueError, match="num_workers is -1, but must be 0 or more"):
        prepare_here(source, output, num_workers=-1)
