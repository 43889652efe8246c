"""Unusable documents are errors, or are skipped and counted."""

import json

import pytest
from dataset.prepare.helpers import TEXTS, content_of, json_lines, prepare_here, read_texts, write_records

from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.dataset.tokenizers.light import train_tokenizer


def test_a_bad_document_is_an_error_and_going_on_without_it_keeps_what_is_done(source, output, tmp_path):
    source.write_text(json_lines(TEXTS[:200]) + "\n{no json}\n" + json_lines(TEXTS[200:]))
    with pytest.raises(ValueError, match=r"source\.jsonl, line 202: this is no JSON"):
        prepare_here(source, output)
    done = read_manifest(output / "train").shards
    assert done
    manifest = prepare_here(source, output, on_bad_data="skip")["train"]
    assert manifest.shards[: len(done)] == done
    assert manifest.skipped == {"no JSON": 1}
    prepare_here(source, tmp_path / "at once", on_bad_data="skip")
    assert content_of(tmp_path / "at once" / "train") == content_of(output / "train")


def test_bad_records_are_left_out_and_counted(tmp_path, output):
    write_records(tmp_path / "records" / "x_0.arecord", [b"good", b"", b"\xff", b"also good"])
    manifest = prepare_here(tmp_path / "records", output, on_bad_data="skip")["train"]
    assert manifest.skipped == {"empty document": 1, "no UTF-8": 1}
    assert read_texts(output / "train") == ["good", "also good"]
    with pytest.raises(ValueError, match="records, document 1: the document is empty"):
        prepare_here(tmp_path / "records", tmp_path / "other")


def test_a_bad_document_is_counted_once_though_both_splits_pass_it(source, output):
    source.write_text(json_lines([*TEXTS, ""]) + "bad\n")
    manifests = prepare_here(source, output, validation_share=0.2, on_bad_data="skip")
    assert manifests["train"].skipped == {"empty document": 1, "no JSON": 1}
    assert manifests["validation"].skipped == {}


@pytest.fixture
def stripping(tmp_path):
    """A tokenizer that finds nothing in white space."""
    folder = train_tokenizer(TEXTS, 300, tmp_path / "stripping")
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder


def test_a_document_without_tokens_is_bad_data(tmp_path, output, stripping):
    source = tmp_path / "source.jsonl"
    source.write_text(json_lines(["words", "   ", "more words"]))
    with pytest.raises(ValueError, match="'   ': the tokenizer finds nothing in it"):
        prepare_here(source, output, tokenizer_path=stripping)
    manifest = prepare_here(source, output, tokenizer_path=stripping, on_bad_data="skip")["train"]
    assert (manifest.num_documents, manifest.skipped) == (2, {"no tokens": 1})


def test_a_source_without_a_good_document_is_refused(tmp_path, output):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="no documents for the split 'train'"):
        prepare_here(tmp_path / "empty.txt", output, on_bad_data="skip")
