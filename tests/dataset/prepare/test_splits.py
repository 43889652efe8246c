"""Each kind of source is read, and its documents are divided into splits."""

import pytest
from dataset.prepare.helpers import TEXTS, json_lines, prepare_here, read_texts, save_dataset, write_records

from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.dataset.shards.token_shards import TokenShards
from xlstm_jax.dataset.sources.standard_library import load_standard_library


def test_the_split_gives_its_name_to_the_folder_and_the_shards(source, output):
    prepare_here(source, output, split="test")
    assert TokenShards(output / "test").manifest.shards[0].file == "test_000000.arecord"


def test_a_share_of_documents_is_for_validation(source, output):
    prepare_here(source, output, validation_share=0.2)
    train, validation = (read_texts(output / name) for name in ("train", "validation"))
    assert sorted(train + validation) == sorted(TEXTS)
    assert 30 < len(validation) < 90


def test_the_side_of_a_document_depends_on_nothing_else(source, output, tmp_path):
    prepare_here(source, output, validation_share=0.2)
    source.write_text(json_lines(reversed(TEXTS[::2])))
    prepare_here(source, tmp_path / "half", validation_share=0.2)
    half = set(read_texts(tmp_path / "half" / "validation"))
    assert half == set(read_texts(output / "validation")) & set(TEXTS[::2])


@pytest.mark.parametrize("share", [0.0, 1.0, -1.0])
def test_a_share_that_leaves_a_split_empty_is_refused(source, output, share):
    with pytest.raises(ValueError, match="validation_share is"):
        prepare_here(source, output, validation_share=share)


def test_a_share_of_a_split_is_refused(source, output):
    with pytest.raises(ValueError, match="validation_share makes two splits of one"):
        prepare_here(source, output, validation_share=0.1, split="test")


@pytest.mark.parametrize("split", ["", "../elsewhere", "a/b", ".."])
def test_a_split_that_is_no_name_of_a_folder_is_refused(source, output, split):
    with pytest.raises(ValueError, match=r"split is .*, but must be a name"):
        prepare(source, output, num_workers=0, split=split)


def test_the_standard_library_has_its_own_splits(output):
    corpus = load_standard_library()
    prepare(["stdlib"], output, num_workers=0, max_document_bytes=None)
    assert read_texts(output / "validation") == [document.content.decode() for document in corpus.validation]
    assert read_manifest(output / "train").num_documents == len(corpus.train)
    assert read_manifest(output / "train").source["sha256"] == corpus.sha256


def test_files_of_the_standard_library_are_cut_for_training_only(output):
    corpus = load_standard_library()
    prepare(["stdlib"], output, num_workers=0, max_document_bytes=2048)
    pieces = read_texts(output / "train")
    assert "".join(pieces) == "".join(document.content.decode() for document in corpus.train)
    assert max(len(piece.encode()) for piece in pieces) <= 2048
    assert read_manifest(output / "validation").num_documents == len(corpus.validation)


def test_the_standard_library_has_no_other_splits(output):
    with pytest.raises(ValueError, match="no split 'test', only train and validation"):
        prepare("stdlib", output, split="test")


@pytest.mark.parametrize("folder", ["records", "records/train"])
def test_records_of_text_are_a_source(tmp_path, output, folder):
    write_records(tmp_path / folder / "x_000000.arecord", [text.encode() for text in TEXTS[:3]])
    write_records(tmp_path / folder / "x_000001.arecord", [text.encode() for text in TEXTS[3:]])
    prepare_here(tmp_path / "records", output)
    assert read_texts(output / "train") == TEXTS


def test_tokens_are_no_source(source, output, tmp_path):
    prepare_here(source, output)
    with pytest.raises(ValueError, match="tokenised already"):
        prepare_here(output, tmp_path / "again")


def test_a_saved_data_set_is_a_source(tmp_path, output):
    prepare_here(save_dataset(tmp_path / "saved", body=TEXTS), output, column="body")
    assert read_texts(output / "train") == TEXTS


def test_a_data_set_of_the_hub_is_asked_for_by_its_name(output, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, split, **_):
        asked.append((path, split))
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prepare_here("hf:owner/name", output, split="test")
    assert asked == [("owner/name", "test")]
    assert read_texts(output / "test") == TEXTS
