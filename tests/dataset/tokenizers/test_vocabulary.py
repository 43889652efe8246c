"""Vocabularies are compared by their sizes and by the digests of their tokenizers."""

import dataclasses

import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.tokenizers.light import train_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import MissingTokenizerError, Vocabulary, check_vocabularies

BYTES = Vocabulary.of_tokenizer(TextEncoder("byte"))
OTHER = dataclasses.replace(BYTES, digest="1234", origin="another tokenizer")
SYMBOLS = Vocabulary(10, "symbols")


def test_a_tokenizer_has_as_many_ids_as_tokens():
    assert BYTES.size == 257
    assert BYTES.digest == TextEncoder("byte").digest


@pytest.mark.parametrize("num_ids", [257, 320, None])
def test_a_model_may_have_more_ids_than_the_data(num_ids):
    check_vocabularies(num_ids, {"train": BYTES, "validation": BYTES, "task": SYMBOLS, "unknown": None})


def test_a_model_with_fewer_ids_than_the_data_is_refused_with_both_numbers():
    message = r"^test: there are 257 token ids \(tokenizer 'byte', .*\), but the model's vocab_size is 256: set"
    with pytest.raises(ConfigError, match=message):
        check_vocabularies(256, {"train": SYMBOLS, "test": BYTES})


def test_another_tokenizer_is_refused_with_the_names_of_both():
    digest = BYTES.digest[:12]
    message = f"^test: another tokenizer, digest 1234 is another tokenizer than tokenizer 'byte', digest {digest}"
    with pytest.raises(ConfigError, match=message):
        check_vocabularies(None, {"task": SYMBOLS, "train": BYTES, "test": OTHER})


def test_special_tokens_around_texts_make_no_other_tokenizer():
    with_bos = Vocabulary.of_tokenizer(TextEncoder("byte", add_bos=True))
    assert with_bos.digest != BYTES.digest
    check_vocabularies(None, {"train": with_bos, "samples": BYTES})


def test_a_tokenizer_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "missing.json"
    with pytest.raises(MissingTokenizerError, match=rf"^tokenizer_path: '{path}' cannot be loaded"):
        Vocabulary.of_tokenizer(TextEncoder(str(path)))


def test_a_tokenizer_that_has_been_replaced_is_not_used(tmp_path):
    train_tokenizer(["some text"], 260, tmp_path)
    vocabulary = Vocabulary.of_tokenizer(TextEncoder(str(tmp_path)))
    assert len(vocabulary.load_tokenizer()) == vocabulary.size
    train_tokenizer(["other words, and more words"], 262, tmp_path)
    with pytest.raises(ConfigError, match="is another tokenizer than"):
        vocabulary.load_tokenizer()


def test_tokens_that_are_no_text_have_no_tokenizer():
    with pytest.raises(ConfigError, match="no tokenizer for symbols"):
        SYMBOLS.load_tokenizer()
