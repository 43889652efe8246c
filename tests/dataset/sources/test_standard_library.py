"""The standard library is a corpus: the right files, a stable split, a hash that identifies it, and true baselines."""

import hashlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xlstm_jax.dataset.sources.standard_library import (
    VALIDATION_SHARE,
    Corpus,
    Document,
    compressor_baselines,
    count_bytes,
    load_standard_library,
)

SOURCES = {"b.py": b"import a\n", "a.py": b"x = 1\r\n", "package/__init__.py": b"\xff\xfe no text", "a/b.py": b"y"}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The corpus of the running Python."""
    return load_standard_library()


@pytest.fixture
def library(tmp_path) -> Path:
    """A folder that looks like a standard library."""
    write(tmp_path, SOURCES)
    return tmp_path


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_documents_are_the_bytes_of_the_files_in_the_order_of_their_names(library):
    documents = load_standard_library(library).documents
    assert [document.name for document in documents] == ["a.py", "a/b.py", "b.py", "package/__init__.py"]
    assert {document.name: document.content for document in documents} == SOURCES


@pytest.mark.parametrize(
    "name",
    [
        "test/test_a.py",
        "package/tests/test_a.py",
        "idlelib/idle_test/test_a.py",
        "encodings/ascii.py",
        "pydoc_data/topics.py",
        "site-packages/numpy/core.py",
        "dist-packages/numpy/core.py",
        "sitecustomize.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "__pycache__/a.cpython-311.pyc",
        "LICENSE.txt",
    ],
)
def test_files_that_are_no_source_of_the_library_are_left_out(library, name):
    before = load_standard_library(library)
    write(library, {name: b"z = 3"})
    assert load_standard_library(library) == before


@pytest.mark.parametrize("name", ["testing.py", "package/test_support.py", "unittest/case.py"])
def test_files_whose_names_only_resemble_those_left_out_belong(library, name):
    write(library, {name: b"z = 3"})
    assert name in [document.name for document in load_standard_library(library).documents]


def test_empty_files_are_no_documents(library):
    write(library, {"empty.py": b""})
    assert len(load_standard_library(library).documents) == len(SOURCES)


def test_the_hash_of_a_known_corpus():
    inner = hashlib.sha256(b"a.py\0x = 1").digest() + hashlib.sha256(b"b.py\0y = 2").digest()
    documents = (Document("a.py", b"x = 1"), Document("b.py", b"y = 2"))
    assert Corpus(documents).sha256 == hashlib.sha256(inner).hexdigest()


@pytest.mark.parametrize(
    "files", [{"a.py": b"x = 2\r\n"}, {"c.py": b"x = 1\r\n"}, {"a.py": b""}], ids=["byte", "more", "less"]
)
def test_the_hash_changes_with_any_file(library, files):
    before = load_standard_library(library).sha256
    write(library, files)
    assert load_standard_library(library).sha256 != before


def test_the_hash_changes_with_a_name(library):
    before = load_standard_library(library).sha256
    (library / "a.py").rename(library / "aa.py")
    assert load_standard_library(library).sha256 != before


def test_the_split_of_known_documents():
    # The share of 0.05 ends at 0x0ccc....
    documents = [Document(name, b"pass") for name in ("641.py", "522.py", "130.py")]
    assert [document.digest.hex()[:4] for document in documents] == ["0cab", "0cd1", "0d0d"]
    assert [document.is_validation for document in documents] == [True, False, False]


def test_the_split_takes_its_share_of_files():
    documents = tuple(Document(f"{index}.py", b"pass") for index in range(10_000))
    assert abs(len(Corpus(documents).validation) / 10_000 - VALIDATION_SHARE) < 0.01


def test_a_document_stays_on_its_side_whatever_the_others_are(corpus):
    half = Corpus(corpus.documents[::2])
    assert set(half.validation) == set(corpus.validation) & set(half.documents)


def test_each_document_is_on_one_side(corpus):
    names = [document.name for document in corpus.train + corpus.validation]
    assert sorted(names) == [document.name for document in corpus.documents]
    assert len(set(names)) == len(names)


def test_the_running_python_has_millions_of_bytes_and_some_of_them_to_validate(corpus):
    assert corpus.num_unreadable == 0
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= {document.name for document in corpus.documents}
    total = count_bytes(corpus.documents)
    assert total > 5_000_000
    assert 0.02 < count_bytes(corpus.validation) / total < 0.12


def test_the_corpus_of_the_running_python_is_the_same_in_another_process(corpus):
    code = "from xlstm_jax.dataset.sources.standard_library import *; print(load_standard_library().describe())"
    process = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    assert process.stdout.strip() == corpus.describe()


def test_the_description_names_sizes_and_hash():
    corpus = Corpus((Document("641.py", b"pass"), Document("522.py", b"pass"), Document("130.py", b"pass")))
    assert corpus.describe() == (
        f"Standard library: train 2 files, 8 bytes; validation 1 files, 4 bytes; sha256 {corpus.sha256}"
    )


def test_files_that_cannot_be_read_are_counted_and_left_out(library, caplog):
    (library / "gone.py").symlink_to(library / "nowhere")
    (library / "loop.py").symlink_to(library / "loop.py")
    with caplog.at_level(logging.WARNING):
        corpus = load_standard_library(library)
    assert corpus.num_unreadable == 2
    assert len(corpus.documents) == len(SOURCES)
    assert [record.getMessage().partition(" paths")[0] for record in caplog.records] == ["2 unreadable"]


def test_folders_that_cannot_be_listed_are_counted(library, monkeypatch):
    scandir = os.scandir

    def refuse_package(path):
        if os.fspath(path).endswith("package"):
            raise PermissionError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_package)
    corpus = load_standard_library(library)
    assert corpus.num_unreadable == 1
    assert len(corpus.documents) == len(SOURCES) - 1


@pytest.mark.parametrize("folder", ["empty", "missing"])
def test_a_folder_without_source_is_refused(tmp_path, folder):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=re.escape(f"No Python source can be read below {tmp_path / folder}")):
        load_standard_library(tmp_path / folder)


def random_bytes(size):
    return np.random.default_rng(0).bytes(size)


def test_compressor_baselines_find_nothing_in_noise_and_much_in_zeros():
    for bits in compressor_baselines([Document("noise", random_bytes(100_000))]).values():
        assert 8 < bits < 8.1
    for bits in compressor_baselines([Document("zeros", bytes(100_000))]).values():
        assert 0 < bits < 0.02


def test_compressor_baselines_read_all_documents_as_one():
    # What comes again 100 kB later is beyond the window of gzip, not that of xz.
    noise = Document("noise", random_bytes(100_000))
    bits = compressor_baselines([noise, noise])
    assert 8 < bits["gzip"] < 8.1
    assert 4 < bits["xz"] < 4.1


def test_compressor_baselines_of_the_running_python_are_those_of_source_code(corpus):
    bits = compressor_baselines(corpus.validation)
    assert 1.2 < bits["xz"] < bits["gzip"] < 2.4


@pytest.mark.parametrize("documents", [[], [Document("empty", b"")]])
def test_compressor_baselines_refuse_nothing(documents):
    with pytest.raises(ValueError, match=f"nothing to compress in these {len(documents)} documents"):
        compressor_baselines(documents)
