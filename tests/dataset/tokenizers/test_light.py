"""Tokenizers without `transformers`: texts come back as they were, and tokens are those that `transformers` finds."""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from xlstm_jax.dataset.hf_tokenizer import load_tokenizer
from xlstm_jax.dataset.tokenizers.light import (
    END_OF_DOCUMENT,
    ByteTokenizer,
    FileTokenizer,
    LightTokenizer,
    train_tokenizer,
)
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

TEXTS = [
    "Häuser und Bäume",
    "def f(x):\n    return x + 1\n",
    " leading  and trailing ",
    "€ 😀 日本語 \0\x7f",
    "a" * 500,
]
SPECIAL = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small tokenizer that was trained on the texts."""
    return train_tokenizer(iter(TEXTS * 20), 300, tmp_path_factory.mktemp("tokenizers") / "trained")


@pytest.fixture
def without_transformers(monkeypatch):
    """Let `import transformers` fail."""
    monkeypatch.setitem(sys.modules, "transformers", None)


def copy_with(folder, target, **rules):
    """Copy a tokenizer with other rules in its `tokenizer.json`."""
    target.mkdir()
    content = json.loads((folder / "tokenizer.json").read_text())
    (target / "tokenizer.json").write_text(json.dumps({**content, **rules}))
    (target / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    return target


# Bytes


@given(st.text())
def test_bytes_come_back_as_text(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert bytes(tokens) == text.encode()
    assert tokenizer.decode(tokens) == text


def test_the_end_of_a_document_is_no_byte():
    tokenizer = ByteTokenizer(add_bos=True, add_eos=True)
    assert tokenizer.encode("hi") == [256, 104, 105, 256]
    assert tokenizer.decode([104, 256, 105]) == f"h{END_OF_DOCUMENT}i"
    assert tokenizer.decode([104, 256, 105], skip_special_tokens=True) == "hi"
    assert len(tokenizer) == tokenizer.vocab_size == 257


def test_bytes_that_are_no_text_are_replaced():
    assert ByteTokenizer().decode([0xE4, 104]) == "\N{REPLACEMENT CHARACTER}h"


# What all tokenizers can do


@pytest.fixture(params=["byte", "trained"])
def tokenizer(request, trained) -> LightTokenizer:
    """Each of the light tokenizers."""
    return ByteTokenizer() if request.param == "byte" else FileTokenizer(trained)


def test_one_text_gives_one_row_and_several_give_several(tokenizer):
    rows = tokenizer(TEXTS)["input_ids"]
    assert len(rows) == len(TEXTS)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == rows


def test_arrays_hold_the_tokens_as_integers_of_32_bits(tokenizer):
    arrays = tokenizer.encode_arrays(TEXTS)
    assert [array.tolist() for array in arrays] == tokenizer(TEXTS)["input_ids"]
    assert all(array.dtype == np.int32 for array in arrays)


def test_a_row_is_cut_at_the_side_that_the_tokenizer_names(tokenizer):
    whole = tokenizer(TEXTS[0])["input_ids"]
    assert tokenizer(TEXTS[0], truncation=True, max_length=3)["input_ids"] == whole[:3]
    assert tokenizer(TEXTS[0], max_length=3)["input_ids"] == whole
    tokenizer.truncation_side = "left"
    assert tokenizer(TEXTS[0], truncation=True, max_length=3)["input_ids"] == whole[-3:]
    assert tokenizer(TEXTS[0], truncation=True, max_length=10_000)["input_ids"] == whole


def test_a_call_can_ask_for_no_special_tokens(trained):
    plain = FileTokenizer(trained).encode("hello")
    tokenizer = FileTokenizer(trained, add_bos=True, add_eos=True)
    assert tokenizer.encode("hello") == [tokenizer.bos_token_id, *plain, tokenizer.eos_token_id]
    assert tokenizer.encode("hello", add_special_tokens=False) == plain


# Trained tokenizers


@given(text=st.text())
def test_a_trained_tokenizer_gives_back_every_text(trained, text):
    tokenizer = FileTokenizer(trained)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_trained_tokenizer_has_the_size_that_was_asked_for_and_compresses(trained):
    tokenizer = FileTokenizer(trained)
    assert len(tokenizer) == 300
    assert len(tokenizer.encode("a" * 500)) < 100


def test_training_again_gives_the_same_tokenizer(trained, tmp_path):
    again = train_tokenizer(TEXTS * 20, 300, tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size is 256"):
        train_tokenizer(TEXTS, 256, tmp_path)


@pytest.mark.parametrize(("add_bos", "add_eos"), SPECIAL)
def test_tokens_are_those_that_transformers_finds(trained, add_bos, add_eos):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(trained, add_bos_token=add_bos, add_eos_token=add_eos)
    ours = FileTokenizer(trained, add_bos, add_eos)
    assert ours(TEXTS)["input_ids"] == theirs(TEXTS)["input_ids"]
    assert (ours.bos_token_id, ours.eos_token_id, len(ours)) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert [ours.decode(row) for row in ours(TEXTS)["input_ids"]] == [
        theirs.decode(row) for row in ours(TEXTS)["input_ids"]
    ]


def test_special_tokens_that_the_file_itself_adds_are_added_only_if_asked_for(trained, tmp_path):
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    folder = copy_with(trained, tmp_path / "bos", post_processor=processor)
    plain = FileTokenizer(trained).encode("hello")
    assert tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("hello").ids == [0, *plain]
    assert FileTokenizer(folder).encode("hello") == plain
    assert FileTokenizer(folder, add_bos=True).encode("hello") == [0, *plain]
    assert TextEncoder(str(folder))(["hello"])[0].tolist() == plain


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_special_token_that_nobody_names_cannot_be_added(trained, tmp_path, name):
    folder = copy_with(trained, tmp_path / "plain")
    (folder / "tokenizer_config.json").unlink()
    assert FileTokenizer(folder).eos_token_id is None
    with pytest.raises(ValueError, match=f"add_{name} is set, but .* names no {name}_token"):
        FileTokenizer(folder, **{f"add_{name}": True})


def test_special_tokens_may_be_written_with_all_their_attributes(trained, tmp_path):
    folder = copy_with(trained, tmp_path / "long")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": END_OF_DOCUMENT, "lstrip": False}})
    )
    assert FileTokenizer(folder).eos_token_id == 0


# By path


def test_bytes_are_asked_for_by_their_name(without_transformers):
    assert isinstance(load_tokenizer("byte", add_bos=False, add_eos=False), ByteTokenizer)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_local_tokenizer_needs_no_transformers(trained, without_transformers, name):
    tokenizer = load_tokenizer(trained / name, add_bos=True, add_eos=False)
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id


def test_a_tokenizer_of_the_hub_needs_transformers(without_transformers):
    with pytest.raises(ImportError, match=r"'gpt2' is not a local tokenizer\.json .* pip install \"xlstm_jax\[hf\]\""):
        load_tokenizer("gpt2", add_bos=False, add_eos=False)


def test_with_transformers_a_local_tokenizer_is_one_of_theirs(trained):
    transformers = pytest.importorskip("transformers")
    for path in (trained, trained / "tokenizer.json"):
        tokenizer = load_tokenizer(path, add_bos=False, add_eos=True)
        assert isinstance(tokenizer, transformers.PreTrainedTokenizerBase)
        assert tokenizer("x")["input_ids"][-1] == tokenizer.eos_token_id


def test_a_file_of_another_name_can_be_a_tokenizer(trained, tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes((trained / "tokenizer.json").read_bytes())
    assert load_tokenizer(file, add_bos=False, add_eos=False).encode("hello") == FileTokenizer(trained).encode("hello")


# Encoders


@pytest.mark.parametrize(("add_bos", "add_eos"), SPECIAL)
def test_an_encoder_finds_the_tokens_of_its_tokenizer_with_and_without_transformers(
    trained, monkeypatch, add_bos, add_eos
):
    results = [TextEncoder(str(trained), add_bos, add_eos)(TEXTS)]
    monkeypatch.setitem(sys.modules, "transformers", None)
    results.append(TextEncoder(str(trained), add_bos, add_eos)(TEXTS))
    expected = FileTokenizer(trained, add_bos, add_eos)(TEXTS)["input_ids"]
    for rows in results:
        assert [row.tolist() for row in rows] == expected
        assert all(row.dtype == np.int32 for row in rows)


def test_an_encoder_cuts_and_pads_nothing_whatever_the_file_says(trained, tmp_path, monkeypatch):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": END_OF_DOCUMENT}
    folder = copy_with(trained, tmp_path / "cutting", truncation=truncation, padding=padding)
    expected = FileTokenizer(trained)(TEXTS)["input_ids"]
    assert [row.tolist() for row in TextEncoder(str(folder))(TEXTS)] == expected
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert [row.tolist() for row in TextEncoder(str(folder))(TEXTS)] == expected


def test_the_digest_is_the_same_with_and_without_transformers_and_wherever_the_tokenizer_is(
    trained, tmp_path, monkeypatch
):
    digests = {TextEncoder(str(trained)).digest, TextEncoder(str(trained / "tokenizer.json")).digest}
    digests.add(TextEncoder(str(copy_with(trained, tmp_path / "copy"))).digest)
    monkeypatch.setitem(sys.modules, "transformers", None)
    digests.add(TextEncoder(str(trained)).digest)
    assert len(digests) == 1


def test_the_digest_changes_with_the_config_of_a_tokenizer(trained, tmp_path):
    folder = copy_with(trained, tmp_path / "other")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "a", "eos_token": END_OF_DOCUMENT})
    )
    assert TextEncoder(str(trained)).digest != TextEncoder(str(folder)).digest


def test_the_digest_tells_tokenizers_and_special_tokens_apart(trained, tmp_path):
    other = train_tokenizer(TEXTS, 290, tmp_path / "other")
    encoders = [TextEncoder("byte"), TextEncoder(str(other))]
    encoders += [TextEncoder(str(trained), add_bos, add_eos) for add_bos, add_eos in SPECIAL]
    assert len({encoder.digest for encoder in encoders}) == len(encoders)


def test_a_copy_in_another_process_finds_the_same_tokens(trained):
    encoder = TextEncoder(str(trained), add_eos=True)
    expected = encoder(["hello"])[0].tolist()
    payload = pickle.dumps(encoder)
    assert len(payload) < 1000
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(['hello'])[0].tolist())"
    result = subprocess.run([sys.executable, "-c", code], input=payload, stdout=subprocess.PIPE, check=True)
    assert json.loads(result.stdout) == expected


def test_an_encoder_knows_what_ends_a_document(trained, tmp_path):
    assert TextEncoder("byte").eod_token_id == 256
    assert TextEncoder(str(trained)).eod_token_id == 0
    folder = copy_with(trained, tmp_path / "plain")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert TextEncoder(str(folder)).eod_token_id is None


def test_the_access_token_is_shown_to_nobody():
    assert "secret" not in repr(TextEncoder("byte", hf_access_token="secret"))
