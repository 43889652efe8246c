"""Tokens on disk come back as they were written, and what is missing or damaged is an error that names the shard."""

import dataclasses
import hashlib
import json
import os
import pickle
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
from array_record.python import array_record_module

from xlstm_jax.dataset.grain_transforms import ParseTokenizedArrayRecords
from xlstm_jax.dataset.shards.manifest import Manifest, Shard, read_manifest, write_manifest
from xlstm_jax.dataset.shards.records import RecordShards, ShardError, find_shards
from xlstm_jax.dataset.shards.token_shards import TokenShards, verify, write_shard

MANIFEST = Manifest(
    tokenizer_path="byte",
    tokenizer_digest="1234",
    vocab_size=50_000,
    eod_token_id=256,
    add_bos=False,
    add_eos=True,
    source={"paths": ["a.txt"], "column": "text"},
)


def documents(num_documents=20, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, 50_000, length, np.int32) for length in random.integers(1, 300, num_documents)]


def write_records(file, records):
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


@pytest.fixture
def folder(tmp_path):
    """Three shards of 20 documents, with a manifest."""
    manifest = MANIFEST
    for index in range(3):
        shard = write_shard(tmp_path / f"train_{index:06}.arecord", documents(seed=index))
        position = (0, 20 * (index + 1)) if index < 2 else None
        manifest = manifest.with_shard(index, dataclasses.replace(shard, next_position=position))
    write_manifest(tmp_path, manifest)
    return tmp_path


@pytest.fixture
def expected():
    """All documents in the folder."""
    return [document for seed in range(3) for document in documents(seed=seed)]


def assert_same(found, wanted):
    assert [document.tolist() for document in found] == [document.tolist() for document in wanted]
    assert all(document.dtype == np.int32 for document in found)


# Reading and writing


def test_documents_come_back_by_number_in_any_order(folder, expected):
    shards = TokenShards(folder)
    assert len(shards) == 60
    assert_same(shards.read(range(60)), expected)
    order = [59, 0, 20, 19, 20, 41]
    assert_same(shards.read(order), [expected[index] for index in order])
    assert shards.read([]) == []


def test_the_number_of_tokens_is_known(folder, expected):
    assert TokenShards(folder).num_tokens == sum(map(len, expected))


def test_records_are_as_documented(tmp_path):
    write_shard(tmp_path / "a_000000.arecord", [np.array([1, 2, 300], np.int32), np.array([70_000], np.int32)])
    records = RecordShards(find_shards(tmp_path)).read_records([0, 1])
    assert records == [b"\1\0\0\0\2\0\0\0\x2c\1\0\0", b"\x70\x11\1\0"]
    parse = ParseTokenizedArrayRecords("text")
    assert parse.map(records[0]) == {"text": [1, 2, 300]}


def test_files_of_others_need_no_manifest_and_are_read_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 9, 100):
        write_records(tmp_path / f"x_{number}.arecord", [np.full(3, number, "<i4").tobytes()] * number)
    shards = TokenShards(tmp_path)
    assert shards.manifest is None
    assert shards.num_tokens is None
    assert len(shards) == 119
    assert_same(shards.read([0, 9, 118]), [np.full(3, number, np.int32) for number in (9, 10, 100)])


@pytest.mark.parametrize("index", [-1, 60])
def test_other_numbers_are_refused(folder, index):
    with pytest.raises(IndexError, match="records go from 0 to 59"):
        TokenShards(folder).read([0, index])


def test_a_copy_in_another_process_reads_the_same(folder, expected):
    shards = TokenShards(folder)
    shards.read([0])
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).read([59])[0].tolist())"
    result = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(shards), stdout=subprocess.PIPE, check=True
    )
    assert json.loads(result.stdout) == expected[59].tolist()


def test_the_same_documents_make_the_same_bytes(tmp_path):
    shards = [write_shard(tmp_path / f"a_{index}.arecord", documents()) for index in range(2)]
    assert shards[0].sha256 == shards[1].sha256
    assert shards[0].sha256 == hashlib.sha256((tmp_path / "a_0.arecord").read_bytes()).hexdigest()


def test_a_shard_appears_only_when_it_is_whole(tmp_path):
    def interrupted():
        yield np.arange(3, dtype=np.int32)
        assert not list(tmp_path.glob("*.arecord"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "a_000000.arecord", interrupted())
    assert find_shards(tmp_path) == []


def test_more_files_can_be_open_than_the_process_was_allowed_to(tmp_path):
    write_records(tmp_path / "x_0.arecord", [b"\1\0\0\0"])
    for number in range(1, 80):
        os.link(tmp_path / "x_0.arecord", tmp_path / f"x_{number}.arecord")
    code = (
        "import resource, sys; from xlstm_jax.dataset.shards.token_shards import TokenShards\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "print(len(TokenShards(sys.argv[1]).read(range(80))))"
    )
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] > 80 + 60
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, check=True)
    assert result.stdout.split() == [b"80"]


def test_what_tells_data_from_other_data_does_not_depend_on_where_it_is(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("moved") / "data"
    described = TokenShards(folder).describe()
    folder.rename(elsewhere)
    assert TokenShards(elsewhere).describe() == described
    (elsewhere / "manifest.json").unlink()
    foreign = TokenShards(elsewhere).describe()
    assert foreign["num_records"] == described["num_records"] == 60
    write_shard(elsewhere / "train_000002.arecord", documents(21))
    assert TokenShards(elsewhere).describe() != foreign


def test_records_without_a_manifest_are_told_apart_by_their_content_and_not_by_their_names(tmp_path):
    def describe(name, *tokens):
        (tmp_path / name).mkdir()
        records = [np.array([token], "<i4").tobytes() for token in tokens]
        write_records(tmp_path / name / f"{name}_0.arecord", records)
        return TokenShards(tmp_path / name).describe()

    assert describe("a", 1, 2, 3) == describe("b", 1, 2, 3)
    assert describe("c", 1, 4, 3) != describe("d", 1, 2, 3)


def test_a_record_is_located_in_its_file(folder):
    records = RecordShards(find_shards(folder))
    assert records.locate(0) == f"record 0 of {folder / 'train_000000.arecord'}"
    assert records.locate(37) == f"record 17 of {folder / 'train_000001.arecord'}"


# Manifests


def test_a_manifest_comes_back_as_it_was_written(folder):
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest == Manifest.from_json(manifest.to_json())
    assert manifest.num_documents == 60
    assert [shard.next_position for shard in manifest.shards] == [(0, 20), (0, 40), None]


def test_a_folder_without_a_manifest_has_none(tmp_path):
    assert read_manifest(tmp_path) is None


def test_a_manifest_can_be_read_by_people(folder):
    content = json.loads((folder / "manifest.json").read_text())
    assert content["format_version"] == 1
    assert content["totals"] == {"num_documents": 60, "num_tokens": TokenShards(folder).num_tokens, "skipped": {}}
    size = (folder / "train_000000.arecord").stat().st_size
    assert content["shards"][0]["num_bytes"] == size


def test_what_was_left_out_is_summed_over_shards():
    shards = [Shard("a", 1, 1, 1, "", skipped, None) for skipped in ({"no JSON": 2}, {"no JSON": 1, "no text": 3})]
    assert dataclasses.replace(MANIFEST, shards=tuple(shards)).skipped == {"no JSON": 3, "no text": 3}


@pytest.mark.parametrize("content", ["", "{}", '{"format_version": 99}', "[]", "null", "3", '"x"'])
def test_a_manifest_that_cannot_be_read_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json is no manifest that can be read"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("value", ["many", None, 2.5, True, -1])
@pytest.mark.parametrize("name", ["vocab_size", "num_documents", "num_tokens", "num_bytes"])
def test_a_manifest_with_a_count_that_is_none_is_refused_by_its_name(folder, name, value, unchecked_shapes):
    content = json.loads((folder / "manifest.json").read_text())
    (content if name == "vocab_size" else content["shards"][1])[name] = value
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"manifest\.json is no manifest.*{name}.* is {value!r}, but must be"):
        TokenShards(folder)


@pytest.mark.parametrize("value", ["end", -5, 1.5, [1], 10**9])
def test_a_manifest_whose_end_of_a_document_is_no_token_is_refused(folder, value, unchecked_shapes):
    content = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**content, "eod_token_id": value}))
    with pytest.raises(ValueError, match=r"manifest\.json is no manifest.*eod_token_id is "):
        TokenShards(folder)


@pytest.mark.parametrize("value", [3, None, "", "../train/train_000000.arecord"])
def test_a_manifest_whose_shard_has_no_name_is_refused(folder, value, unchecked_shapes):
    content = json.loads((folder / "manifest.json").read_text())
    content["shards"][0]["file"] = value
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json is no manifest.*the file of a shard is "):
        TokenShards(folder)


def test_a_manifest_that_names_a_shard_twice_is_refused(folder):
    content = json.loads((folder / "manifest.json").read_text())
    content["shards"].insert(0, content["shards"][0])
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json is no manifest.*it names a shard twice"):
        TokenShards(folder)


# Damage


def damage(file, how):
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.write_bytes(content[:200] + bytes(byte ^ 255 for byte in content[200:250]) + content[250:])


@pytest.mark.parametrize("how", ["missing", "cut", "empty"])
def test_opening_refuses_a_shard_that_is_not_whole_and_says_what_to_do(folder, how):
    damage(folder / "train_000001.arecord", how)
    with pytest.raises(ShardError, match=r"train_000001\.arecord .*: delete it and run the command again"):
        TokenShards(folder)


@pytest.mark.parametrize("how", ["cut", "empty"])
def test_opening_refuses_a_damaged_file_of_others(folder, how):
    (folder / "manifest.json").unlink()
    damage(folder / "train_000001.arecord", how)
    with pytest.raises(ShardError, match=r"train_000001\.arecord cannot be read: "):
        TokenShards(folder)


@pytest.mark.parametrize("how", ["missing", "cut", "empty", "bytes"])
def test_reading_refuses_a_shard_that_was_damaged_after_the_data_was_opened(folder, how):
    shards = TokenShards(folder)
    damage(folder / "train_000001.arecord", how)
    shards.read([0, 59])
    with pytest.raises(ShardError, match=r"train_000001\.arecord cannot be read: "):
        shards.read([0, *range(20, 40)])


def test_reading_refuses_a_shard_that_becomes_shorter_while_it_is_open(folder):
    shards = TokenShards(folder)
    shards.read([20])
    os.truncate(folder / "train_000001.arecord", 1000)
    with pytest.raises(ValueError, match=r"train_000001\.arecord cannot be read: "):
        shards.read(range(20, 40))


def test_reading_refuses_a_shard_of_another_length(folder):
    shards = TokenShards(folder)
    write_shard(folder / "train_000001.arecord", documents(21))
    with pytest.raises(
        ValueError, match=r"train_000001\.arecord cannot be read: it has 21 records, but should have 20"
    ):
        shards.read([20])


def test_empty_records_of_others_are_no_damage(tmp_path):
    write_records(tmp_path / "x_0.arecord", [b"", b"\1\0\0\0"])
    assert [document.tolist() for document in TokenShards(tmp_path).read([0, 1])] == [[], [1]]


def test_records_of_text_are_refused(tmp_path):
    write_records(tmp_path / "x_0.arecord", [b"hello"])
    with pytest.raises(ValueError, match="is it text"):
        TokenShards(tmp_path).read([0])


@pytest.mark.parametrize("record", [b"text", np.array([1, -1], "<i4").tobytes(), (2**24).to_bytes(4, "little")])
def test_numbers_that_no_tokenizer_has_are_refused(tmp_path, record):
    write_records(tmp_path / "x_0.arecord", [b"\1\0\0\0", record])
    shards = TokenShards(tmp_path)
    with pytest.raises(ValueError, match=r"record 1 of .*x_0\.arecord holds no tokens, .* is it text\?") as info:
        shards.read([0, 1])
    assert not isinstance(info.value, ShardError)


@pytest.mark.parametrize("vocab_size", [50_000, 49_000])
def test_tokens_must_be_below_the_size_of_the_vocabulary(folder, expected, vocab_size):
    write_manifest(folder, dataclasses.replace(read_manifest(folder), vocab_size=vocab_size))
    shards = TokenShards(folder)
    if vocab_size == 50_000:
        assert_same(shards.read(range(60)), expected)
    else:
        with pytest.raises(ValueError, match=r"is not from 0 to 48999: it does not match manifest\.json"):
            shards.read(range(60))


@pytest.mark.parametrize("kind", ["pipe", "dangling link"])
def test_what_is_no_file_is_no_shard(tmp_path, kind):
    file = tmp_path / "x_0.arecord"
    os.mkfifo(file) if kind == "pipe" else file.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ShardError, match=r"x_0\.arecord cannot be read: "):
        TokenShards(tmp_path)


def test_errors_of_shards_reach_other_processes():
    error = pickle.loads(pickle.dumps(ShardError("The shard is damaged.")))
    assert (type(error), str(error)) == (ShardError, "The shard is damaged.")


def test_an_unfinished_folder_is_refused(folder):
    manifest = read_manifest(folder)
    write_manifest(folder, dataclasses.replace(manifest, shards=manifest.shards[:2]))
    with pytest.raises(ValueError, match=re.escape(f"{folder} is not completely prepared")):
        TokenShards(folder)


def test_shards_that_the_manifest_does_not_know_are_refused(folder):
    write_shard(folder / "train_000003.arecord", documents())
    with pytest.raises(ValueError, match=r"manifest\.json does not list train_000003\.arecord"):
        TokenShards(folder)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"There are no shards {tmp_path}")):
        TokenShards(tmp_path)


def test_sound_shards_are_verified(folder):
    verify(folder)


def test_verifying_finds_damage_that_leaves_the_size_as_it_is(folder):
    for index in (0, 2):
        damage(folder / f"train_{index:06}.arecord", "bytes")
    TokenShards(folder)
    with pytest.raises(
        ShardError, match=r"damaged: train_000000\.arecord, train_000002\.arecord\. For each of them, delete"
    ):
        verify(folder)


@pytest.mark.parametrize("field", ["num_documents", "num_tokens"])
def test_verifying_counts(folder, field):
    manifest = read_manifest(folder)
    shard = manifest.shards[1]
    wrong = dataclasses.replace(shard, **{field: getattr(shard, field) + 1})
    write_manifest(folder, manifest.with_shard(1, wrong))
    with pytest.raises(ValueError, match=r"damaged: train_000001\.arecord\."):
        verify(folder)


def test_there_is_nothing_to_verify_without_a_manifest(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no .*manifest\.json to compare"):
        verify(folder)
