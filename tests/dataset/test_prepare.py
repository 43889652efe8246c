"""Documents are tokenised once: the same bytes whoever does it, whatever interrupts it, and never half of them."""

import dataclasses
import errno
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from array_record.python import array_record_module
from processes import is_running, wait_until

from xlstm_jax.dataset import prepare as module
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.manifest import read_manifest, write_manifest
from xlstm_jax.dataset.shards.token_shards import TokenShards, verify, write_shard
from xlstm_jax.dataset.sources.standard_library import load_standard_library
from xlstm_jax.dataset.sources.text_store import lock
from xlstm_jax.dataset.tokenizers.light import ByteTokenizer, FileTokenizer, train_tokenizer
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder

TEXTS = [f"Document {number}: " + "words and more words " * (number % 7) for number in range(300)]
KILOBYTE = 1 / 1024


def json_lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def source(tmp_path):
    """A file of documents."""
    file = tmp_path / "source.jsonl"
    file.write_text(json_lines(TEXTS))
    return file


@pytest.fixture
def output(tmp_path):
    """Where to write."""
    return tmp_path / "output"


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


# What is written


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
    monkeypatch.setattr(module, "_MAX_SHARD_DOCUMENTS", 100)
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


@pytest.mark.parametrize("split", ["", "../elsewhere", "a/b", ".."])
def test_a_split_that_is_no_name_of_a_folder_is_refused(source, output, split):
    with pytest.raises(ValueError, match=r"split is .*, but must be a name"):
        prepare(source, output, num_workers=0, split=split)


def test_no_sources_are_refused(output):
    with pytest.raises(ValueError, match="sources is empty"):
        prepare([], output, num_workers=0)


def test_a_negative_number_of_workers_is_refused(source, output):
    with pytest.raises(ValueError, match="num_workers is -1, but must be 0 or more"):
        prepare_here(source, output, num_workers=-1)


# Sources


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


def save_dataset(folder, **columns):
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(columns)}).save_to_disk(folder)
    return folder


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


# Bad data


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


# Going on


def start(*arguments, **environment):
    command = [sys.executable, "-m", "xlstm_jax.cli.main", "prepare", *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **environment}, cwd=Path(__file__).parents[2])


def running_children(process_id):
    """Return the processes that another one has started and that have not ended."""
    stats = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append((int(file.parent.name), *file.read_text().rpartition(")")[2].split()[:2]))
        except OSError:  # It has ended since.
            continue
    return [child for child, state, parent in stats if int(parent) == process_id and state != "Z"]


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes_and_leaves_no_worker(tmp_path, output):
    texts = [f"{number}" * 100 for number in range(8000)]
    source = tmp_path / "source.jsonl.gz"
    source.write_bytes(gzip.compress((json_lines(texts[:5000]) + "bad\n" + json_lines(texts[5000:])).encode()))
    options = {"shard_megabytes": 16 * KILOBYTE, "on_bad_data": "skip"}
    prepare_here(source, tmp_path / "whole", **options)
    shards = []
    for least in (1, 20, 40):
        process = start(
            source, "--output", output, "--shard-megabytes", 16 * KILOBYTE, "--on-bad-data", "skip", "--workers", 2
        )
        with process:
            wait_until(lambda least=least: len(getattr(read_manifest(output / "train"), "shards", ())) >= least)
            children = running_children(process.pid)
            process.kill()
        assert len(children) == 2
        wait_until(lambda children=children: not any(map(is_running, children)))
        shards.append(len(read_manifest(output / "train").shards))
        with pytest.raises(ValueError, match="has not been prepared to its end"):
            TokenShards(output / "train")
    prepare_here(source, output, **options)
    assert shards == sorted(shards)
    assert content_of(output / "train") == content_of(tmp_path / "whole" / "train")


def test_what_is_finished_is_not_done_again(source, output, monkeypatch):
    before = prepare_here(source, output)
    times = {file: file.stat().st_mtime_ns for file in (output / "train").iterdir()}
    monkeypatch.setattr(module, "WorkerPool", None)
    assert prepare_here(source, output) == before
    assert {file: file.stat().st_mtime_ns for file in (output / "train").iterdir()} == times


@pytest.fixture(params=["lines", "records"])
def spoilt(request, tmp_path):
    """A source in which every third document is empty, the first and the last too."""
    texts = ["" if index % 3 == 0 else text for index, text in enumerate([*TEXTS, ""])]
    if request.param == "lines":
        (tmp_path / "spoilt.jsonl").write_text(json_lines(texts))
        return tmp_path / "spoilt.jsonl"
    write_records(tmp_path / "spoilt" / "x_000000.arecord", [text.encode() for text in texts])
    return tmp_path / "spoilt"


@pytest.mark.parametrize("how", ["missing", "cut"])
def test_a_shard_that_is_missing_or_cut_is_written_again_and_no_other(spoilt, output, how):
    options = {"on_bad_data": "skip", "train_vocab_size": 280}
    manifest = prepare_here(spoilt, output, **options)["train"]
    assert manifest.skipped == {"empty document": 101}
    before = content_of(output / "train")
    times = {file.name: file.stat().st_mtime_ns for file in (output / "train").glob("*.arecord")}
    for name in ("train_000000.arecord", "train_000001.arecord", "train_000003.arecord"):
        file = output / "train" / name
        file.unlink() if how == "missing" else os.truncate(file, 1000)
        del times[name]
    prepare_here(spoilt, output, **options)
    assert content_of(output / "train") == before
    assert {name: (output / "train" / name).stat().st_mtime_ns for name in times} == times


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"add_eos": True}, "add_eos: False there, True here"),
        ({"shard_megabytes": 1.0}, "shard_bytes: 2048 there, 1048576 here"),
        ({"column": "body"}, "column: text there, body here"),
        ({"max_document_bytes": None}, "max_document_bytes: 65536 there, None here"),
        ({"validation_share": 0.5}, "validation_share: None there, 0.5 here"),
    ],
)
def test_a_folder_that_was_prepared_otherwise_is_refused_with_the_difference(source, output, options, difference):
    prepare_here(source, output)
    before = content_of(output / "train")
    with pytest.raises(ValueError, match=re.escape(difference)):
        prepare_here(source, output, **options)
    assert content_of(output / "train") == before


def test_another_source_is_refused(source, output):
    prepare_here(source, output)
    source.write_text(json_lines(TEXTS[1:]))
    with pytest.raises(ValueError, match=r"num_bytes: .* there, .* here"):
        prepare_here(source, output)


@pytest.mark.parametrize("kind", ["lines", "records", "dataset"])
def test_a_source_of_the_same_size_with_another_content_is_refused(tmp_path, output, kind):
    def write(texts):
        source = tmp_path / kind
        if kind == "lines":
            source.write_text(json_lines(texts))
        elif kind == "records":
            write_records(source / "x_0.arecord", [text.encode() for text in texts])
        else:
            save_dataset(source, text=texts)
        return source

    texts = [f"text {number}" for number in range(10)]
    prepare_here(write(texts), output)
    with pytest.raises(ValueError, match=r"samples: .* there, .* here"):
        prepare_here(write([*texts[:5], "TEXT 5", *texts[6:]]), output)


def test_a_source_may_move(source, output, tmp_path):
    before = prepare_here(source, output)
    (tmp_path / "moved").mkdir()
    assert prepare_here(source.rename(tmp_path / "moved" / source.name), output) == before


def test_what_was_prepared_otherwise_can_be_replaced(source, output, tmp_path):
    prepare_here(source, output)
    prepare_here(source, output, shard_megabytes=1, overwrite=True)
    prepare_here(source, tmp_path / "fresh", shard_megabytes=1)
    assert content_of(output / "train") == content_of(tmp_path / "fresh" / "train")


@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
def test_shards_of_others_are_refused_and_stay(source, output, options):
    (output / "train").mkdir(parents=True)
    write_shard(output / "train" / "theirs_000000.arecord", [])
    before = content_of(output / "train")
    with pytest.raises(ValueError, match=r"move theirs_000000\.arecord away"):
        prepare_here(source, output, **options)
    assert content_of(output / "train") == before


def test_overwriting_removes_no_shard_that_the_manifest_does_not_know(source, output):
    prepare_here(source, output)
    write_shard(output / "train" / "train_999999.arecord", [])
    before = content_of(output / "train")
    with pytest.raises(ValueError, match=r"move train_999999\.arecord away"):
        prepare_here(source, output, add_eos=True, overwrite=True)
    assert content_of(output / "train") == before


def test_overwriting_removes_what_a_killed_run_has_left_and_nothing_else(source, output, tmp_path):
    manifest = prepare_here(source, output)["train"]
    write_manifest(output / "train", dataclasses.replace(manifest, shards=manifest.shards[:2]))
    (output / "train" / ".train_000009.arecord.tmp").write_text("half")
    (output / "train" / ".theirs.tmp").write_text("theirs")
    prepare_here(source, output, shard_megabytes=1, overwrite=True)
    prepare_here(source, tmp_path / "fresh", shard_megabytes=1)
    expected = {**content_of(tmp_path / "fresh" / "train"), ".theirs.tmp": b"theirs"}
    assert content_of(output / "train") == expected


def test_a_shard_that_is_damaged_at_the_same_size_is_written_again_if_all_are_verified(source, output):
    manifest = prepare_here(source, output)["train"]
    before = content_of(output / "train")
    times = {file.name: file.stat().st_mtime_ns for file in (output / "train").glob("*.arecord")}
    damaged = output / "train" / "train_000002.arecord"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:200] + bytes(byte ^ 255 for byte in content[200:250]) + content[250:])
    del times[damaged.name]
    assert prepare_here(source, output, verify=True)["train"] == manifest
    assert content_of(output / "train") == before
    assert {name: (output / "train" / name).stat().st_mtime_ns for name in times} == times


def test_a_folder_in_which_another_prepare_works_is_refused(source, output):
    output.mkdir()
    with open(output / ".prepare.lock", "wb") as file:
        lock(file.fileno())
        with pytest.raises(ValueError, match=re.escape(f"Another prepare works in {output}")):
            prepare_here(source, output)
    prepare_here(source, output)


def test_a_file_system_without_locks_is_no_hindrance(source, output, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    prepare_here(source, output)
    assert read_texts(output / "train") == TEXTS


# Training a tokenizer


def test_a_tokenizer_is_trained_once_and_used(source, output, monkeypatch):
    prepare_here(source, output, train_vocab_size=280)
    tokenizer = FileTokenizer(output / "tokenizer")
    assert len(tokenizer) == 280
    shards = TokenShards(output / "train")
    assert tokenizer.decode(shards.read([7])[0]) == TEXTS[7]
    assert shards.manifest.tokenizer_digest == TextEncoder(str(output / "tokenizer")).digest
    monkeypatch.setattr(module, "train_tokenizer", None)
    prepare_here(source, output, train_vocab_size=280)


def test_a_tokenizer_is_trained_on_documents_for_training_only(source, output, monkeypatch):
    seen = []

    def train(texts, vocab_size, folder):
        seen.extend(texts)
        return train_tokenizer(seen, vocab_size, folder)

    monkeypatch.setattr(module, "train_tokenizer", train)
    prepare_here(source, output, train_vocab_size=280, validation_share=0.2)
    manifest = read_manifest(output / "train")
    assert len(seen) == manifest.num_documents
    assert manifest.skipped == {}


def test_a_tokenizer_is_trained_on_no_more_than_asked_for(tmp_path, output, monkeypatch):
    write_records(tmp_path / "records" / "x_0.arecord", [b"0123456789" for _ in range(5000)])
    seen = []
    monkeypatch.setattr(
        module, "train_tokenizer", lambda texts, size, folder: train_tokenizer(seen.extend(texts) or seen, size, folder)
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


# Progress


def test_progress_is_shown_in_a_terminal_only(source, output, tmp_path, capsys, monkeypatch):
    prepare_here(source, output)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    prepare_here(source, tmp_path / "shown")
    shown = capsys.readouterr().err
    assert "300 documents" in shown
    assert "MB/s" in shown
    assert "100 %" in shown
