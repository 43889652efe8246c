"""The vocabulary of data is known before its tokens are read, from the manifest of shards above all."""

import logging

import pytest
from meshes import make_mesh

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset import (
    FormalTaskDataConfig,
    GrainArrayRecordsDataConfig,
    SyntheticDataConfig,
    TextFilesDataConfig,
    create_data_iterator,
    create_mixed_data_iterator,
)
from xlstm_jax.dataset.configs import DataConfig
from xlstm_jax.dataset.hf_tokenizer import load_tokenizer
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.manifest import MANIFEST_FILE, read_manifest
from xlstm_jax.dataset.sources.text_measures import measure_text
from xlstm_jax.dataset.sources.vocabulary_lookup import find_vocabulary, is_available_offline
from xlstm_jax.dataset.tokenizers.light import train_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import MissingTokenizerError

TEXTS = [f"Text {index} has words, and some words more.\n" for index in range(40)]
BATCHES = {"global_batch_size": 4, "max_target_length": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with texts, prepared with a tokenizer that was trained on them (trained) and with bytes (bytes)."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "source").mkdir()
    for index, text in enumerate(TEXTS):
        (folder / "source" / f"{index:02}.txt").write_text(text)
    prepare(folder / "source", folder / "trained", train_vocab_size=280, num_workers=0)
    prepare(folder / "source", folder / "bytes", num_workers=0)
    return folder


def shards(path, **fields):
    return GrainArrayRecordsDataConfig(data_path=path, tokenize_data=False, **{**BATCHES, **fields})


def without_manifest(folder, target):
    (target / "train").mkdir(parents=True)
    for file in (folder / "train").glob("*.arecord"):
        (target / "train" / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("fields", [{}, {"tokenizer_path": None}])
def test_shards_have_the_vocabulary_of_their_manifest(fields, folder):
    manifest = read_manifest(folder / "trained/train")
    vocabulary = find_vocabulary(shards(folder / "trained", **fields))
    assert (vocabulary.size, vocabulary.digest) == (manifest.vocab_size, manifest.tokenizer_digest)
    assert len(vocabulary.load_tokenizer()) == vocabulary.size == 280
    assert is_available_offline(shards(folder / "trained", **fields))


def test_a_loader_knows_the_vocabulary_of_its_data(folder):
    config = shards(folder / "trained", packing="stream")
    assert create_data_iterator(config, make_mesh()).vocabulary == find_vocabulary(config)
    mixed = [shards(folder / "trained", name=name, packing="stream") for name in "ab"]
    assert create_mixed_data_iterator(mixed, make_mesh()).vocabulary == find_vocabulary(config)
    texts = TextFilesDataConfig(data_path=folder / "source", tokenizer_path="byte", worker_count=0, **BATCHES)
    assert create_data_iterator(texts, make_mesh()).vocabulary.digest == TextEncoder("byte").digest
    task = FormalTaskDataConfig(task="parity", min_length=3, max_length=8, global_batch_size=4)
    assert create_data_iterator(task, make_mesh()).vocabulary.size == find_vocabulary(task).size < 20
    synthetic = SyntheticDataConfig(vocab_size=30, **BATCHES)
    assert create_data_iterator(synthetic, make_mesh()).vocabulary.size == 30


def test_the_tokenizer_that_is_set_beside_a_manifest_has_to_be_its_own(folder):
    find_vocabulary(shards(folder / "trained", tokenizer_path=str(folder / "trained/tokenizer")))
    message = r"^tokenizer_path: tokenizer 'byte', .* is another tokenizer than .*manifest\.json of tokenizer"
    for make in (find_vocabulary, lambda config: create_data_iterator(config, make_mesh())):
        with pytest.raises(ConfigError, match=message):
            make(shards(folder / "trained", tokenizer_path="byte"))


def test_a_default_is_no_tokenizer_that_is_set(folder):
    config = shards(folder / "bytes")
    assert config.tokenizer_path == "gpt2"
    assert find_vocabulary(config).size == 257
    assert is_available_offline(config)
    assert not is_available_offline(shards(folder / "bytes", tokenizer_path="gpt2"))


def test_where_the_tokenizer_that_is_set_cannot_be_loaded_the_manifest_holds_and_the_log_says_so(folder, caplog):
    config = shards(folder / "trained", tokenizer_path="/not/there.json")
    with caplog.at_level(logging.WARNING):
        vocabulary = find_vocabulary(config)
    assert vocabulary.size == 280
    assert "'/not/there.json' cannot be loaded to compare it" in caplog.text
    with pytest.raises(MissingTokenizerError, match=r"'/not/there\.json'"):
        measure_text(config, 1000)


@pytest.mark.parametrize("with_bos", [False, True])
def test_the_tokenizer_of_shards_is_found_wherever_their_folder_has_moved(with_bos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    monkeypatch.chdir(tmp_path / "before")
    with open("texts.txt", "w") as file:
        file.writelines(TEXTS)
    train_tokenizer(TEXTS, 270, tmp_path / "before/tokens/mine")
    prepare("texts.txt", "data/trained", train_vocab_size=280, num_workers=0, add_bos=with_bos)
    prepare("texts.txt", "data/given", tokenizer_path="tokens/mine", num_workers=0, add_bos=with_bos)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").rename(tmp_path / "after")
    for name, size in (("trained", 280), ("given", 270)):
        vocabulary = find_vocabulary(shards(f"after/data/{name}"))
        assert len(vocabulary.load_tokenizer()) == vocabulary.size == size


def test_a_tokenizer_that_took_the_place_of_that_of_the_shards_is_not_used(tmp_path):
    (tmp_path / "texts.txt").write_text("".join(TEXTS))
    prepare(tmp_path / "texts.txt", tmp_path / "data", train_vocab_size=280, num_workers=0)
    train_tokenizer(TEXTS, 270, tmp_path / "data/tokenizer")
    vocabulary = find_vocabulary(shards(tmp_path / "data"))
    assert vocabulary.size == 280
    with pytest.raises(ConfigError, match="is another tokenizer than"):
        vocabulary.load_tokenizer()


def test_shards_without_a_manifest_need_a_tokenizer(folder, tmp_path):
    foreign = without_manifest(folder / "bytes", tmp_path / "foreign")
    assert find_vocabulary(shards(foreign, tokenizer_path="byte")).size == 257
    assert find_vocabulary(shards(foreign, tokenizer_path=None)) is None
    assert not is_available_offline(shards(foreign, tokenizer_path=None))
    with pytest.raises(ConfigError, match=rf"tokenizer_path is None, but .*train has no {MANIFEST_FILE}"):
        create_data_iterator(shards(foreign, tokenizer_path=None), make_mesh())
    iterator = create_data_iterator(shards(foreign, tokenizer_path=None, add_eod=False), make_mesh())
    assert iterator.vocabulary is None


def test_texts_need_a_tokenizer(folder):
    with pytest.raises(ConfigError, match="tokenizer_path is None, but texts need a tokenizer"):
        find_vocabulary(TextFilesDataConfig(data_path=folder / "source", tokenizer_path=None, **BATCHES))


def test_data_of_a_kind_of_ones_own_has_no_vocabulary_that_is_known():
    assert find_vocabulary(DataConfig(global_batch_size=4)) is None


def test_the_bytes_of_a_token_are_those_of_the_tokenizer_of_the_manifest(folder):
    measures = measure_text(shards(folder / "trained"), 2**20)
    tokenizer = load_tokenizer(folder / "trained/tokenizer", add_bos=False, add_eos=False)
    num_tokens = sum(len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in TEXTS)
    assert measures.bytes_per_token == sum(map(len, TEXTS)) / num_tokens
