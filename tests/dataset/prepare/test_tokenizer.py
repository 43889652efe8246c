"""A tokenizer is trained once, on documents for training only."""

import pytest
from dataset.prepare.helpers import KILOBYTE, TEXTS, content_of, prepare_here, write_records

from xlstm_jax.dataset.prepare import tokenizer as trainer_module
from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.tokenizers.light import FileTokenizer, train_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder


def test_a_tokenizer_is_trained_once_and_used(source, output, monkeypatch):
    prepare_here(source, output, train_vocab_size=280)
    tokenizer = FileTokenizer(output / "tokenizer")
    assert len(tokenizer) == 280
    shards = TokenShards(output / "train")
    assert tokenizer.decode(shards.read([7])[0]) == TEXTS[7]
    assert shards.manifest.tokenizer_digest == TextEncoder(str(output / "tokenizer")).digest
    monkeypatch.setattr(trainer_module, "train_tokenizer", None)
    prepare_here(source, output, train_vocab_size=280)


def test_a_tokenizer_is_trained_on_documents_for_training_only(source, output, monkeypatch):
    seen = []

    def train(texts, vocab_size, folder):
        seen.extend(texts)
        return train_tokenizer(seen, vocab_size, folder)

    monkeypatch.setattr(trainer_module, "train_tokenizer", train)
    prepare_here(source, output, train_vocab_size=280, validation_share=0.2)
    manifest = read_manifest(output / "train")
    assert len(seen) == manifest.num_documents
    assert manifest.skipped == {}


def test_a_tokenizer_is_trained_on_no_more_than_asked_for(tmp_path, output, monkeypatch):
    write_records(tmp_path / "records" / "x_0.arecord", [b"0123456789" for _ in range(5000)])
    seen = []
    monkeypatch.setattr(
        trainer_module,
        "train_tokenizer",
        lambda texts, size, folder: train_tokenizer(seen.extend(texts) or seen, size, folder),
    )
    prepare_here(tmp_path / "records", output, train_vocab_size=260, train_megabytes=20 * KILOBYTE, shard_megabytes=1)
    assert len(seen) == 2048


def test_a_tokenizer_is_either_trained_or_given(source, output):
    with pytest.raises(ValueError, match="there is one: gpt2"):
        prepare_here(source, output, train_vocab_size=280, tokenizer_path="gpt2")


def test_another_tokenizer_in_the_folder_is_refused(source, output):
    prepare_here(source, output, train_vocab_size=280)
    with pytest.raises(ValueError, match=r"vocab_size: 280 there, 290 here.*--tokenizer"):
        prepare_here(source, output, train_vocab_size=290)
    prepare_here(source, output, train_vocab_size=290, overwrite=True)
    assert read_manifest(output / "train").vocab_size == 290


@pytest.mark.parametrize("name", ["trained_on.json", "notes.txt"])
def test_overwriting_removes_no_tokenizer_of_others(source, output, name):
    prepare_here(source, output, train_vocab_size=280)
    file = output / "tokenizer" / name
    file.unlink() if file.exists() else file.write_text("keep")
    before = content_of(output / "tokenizer")
    with pytest.raises(ValueError, match=f"move {'it' if name == 'trained_on.json' else name} away"):
        prepare_here(source, output, train_vocab_size=290, overwrite=True)
    assert content_of(output / "tokenizer") == before
