"""An interrupted or repeated call resumes, and shards prepared with other options are refused or replaced."""

import dataclasses
import errno
import gzip
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from dataset.prepare.helpers import (
    KILOBYTE,
    TEXTS,
    content_of,
    json_lines,
    prepare_here,
    read_texts,
    save_dataset,
    write_records,
)
from processes import is_running, wait_until

from xlstm_jax.dataset.prepare import writing
from xlstm_jax.dataset.shards.manifest import read_manifest, write_manifest
from xlstm_jax.dataset.shards.token_shards import TokenShards, write_shard
from xlstm_jax.utils.locks import lock

pytestmark = pytest.mark.slow


def start(*arguments, **environment):
    command = [sys.executable, "-m", "xlstm_jax.cli.main", "prepare", *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **environment}, cwd=Path(__file__).parents[3])


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
        with pytest.raises(ValueError, match="is not completely prepared"):
            TokenShards(output / "train")
    prepare_here(source, output, **options)
    assert shards == sorted(shards)
    assert content_of(output / "train") == content_of(tmp_path / "whole" / "train")


def test_what_is_finished_is_not_done_again(source, output, monkeypatch):
    before = prepare_here(source, output)
    times = {file: file.stat().st_mtime_ns for file in (output / "train").iterdir()}
    monkeypatch.setattr(writing, "WorkerPool", None)
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
