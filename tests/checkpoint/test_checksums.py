"""Corrupt checkpoints are found, reported and set aside; what was saved before them is used."""

import hashlib
import json
import logging
import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint.states import assert_same

from xlstm_jax.checkpoint import checksums, files
from xlstm_jax.checkpoint.checksums import CHECKSUMS_FILE, CorruptCheckpointError
from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.slow

RUN = {"trainer": {"callbacks": [{"save_optimizer_state": True, "save_dataloader_state": True}]}}
PARTS = ["params", "opt_state", "step", "rng", "data", "run", "metadata"]


def state(value):
    """All parts of a state that a run needs."""
    kernel = {"kernel": jnp.full((2, 3), value, jnp.float32)}
    return {"params": kernel, "opt_state": {"mu": kernel}, "step": jnp.int32(value), "rng": jnp.zeros(2, jnp.uint32)}


def save(store, *steps):
    """Save a checkpoint of each step."""
    for step in steps:
        store.save(step, state(step), {"metadata": RUN, "data": {"loaders": {}}, "run": {"tokens_seen": step}})


@pytest.fixture
def store(tmp_path):
    """A store with checkpoints of the steps 1 and 2, the newest with metrics."""
    store = CheckpointStore(tmp_path / "checkpoints", use_async=False)
    save(store, 1, 2)
    store.save_metrics(2, {"loss": 3.0})
    store.close()
    yield store
    store.close()


def all_files(folder):
    return [path for path in sorted(Path(folder).rglob("*")) if path.is_file()]


def flipped(content, index):
    return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]


def test_every_flipped_truncated_missing_or_extra_byte_is_found(store):
    assert store.problem(2) is None
    for file in all_files(store.path(2)):
        content = file.read_bytes()
        damages = [flipped(content, index) for index in {0, len(content) // 2, len(content) - 1} if content]
        for damaged in [*damages, content[:-1], content + b"\n", None]:
            if damaged == content:
                continue
            file.unlink() if damaged is None else file.write_bytes(damaged)
            problem = store.problem(2)
            assert problem is not None, (file, damaged)
            assert file.name in problem
            file.write_bytes(content)
    assert store.problem(2) is None


def test_every_flipped_byte_of_the_checksums_is_found(store):
    file = store.path(2) / CHECKSUMS_FILE
    content = file.read_bytes()
    for index in range(0, len(content), 7):
        file.write_bytes(flipped(content, index))
        assert "checksums.json is damaged" in store.problem(2)


@pytest.mark.parametrize("added", ["params/d/new", "ema_params/d", "new"])
def test_a_file_or_item_that_was_added_is_found(store, added):
    path = store.path(2) / added
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"1")
    assert "was added" in store.problem(2)


def test_what_file_managers_and_killed_processes_leave_is_no_damage(store):
    for name in (".DS_Store", "params/.nfs0001", "metrics/metrics.tmp"):
        (store.path(2) / name).write_bytes(b"1")
    assert store.problem(2) is None


@pytest.mark.parametrize("part", [*PARTS, CHECKSUMS_FILE, "."])
def test_the_checkpoint_before_a_corrupt_one_is_used(store, part, caplog):
    path = store.path(2) / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if part == ".":
        path.mkdir()
    assert store.select() == 1
    assert_same(store.restore(1, state(0)), state(1))
    warning = next(record.getMessage() for record in caplog.records if record.name.startswith("xlstm_jax"))
    assert "checkpoint_2 is corrupt: " in warning
    assert "renamed to corrupt-checkpoint_2; step 1 is used instead" in warning
    assert "\n" not in warning
    assert {file.name for file in store.folder.iterdir()} == {"checkpoint_1", "corrupt-checkpoint_2"}
    save(store, 2)
    assert store.select() == 2


def test_a_corrupt_checkpoint_is_no_longer_the_newest_one_for_others(store):
    (store.path(2) / "metadata" / "metadata").write_text("{")
    again = CheckpointStore(store.folder)
    assert again.select() == 1
    assert again.steps() == [1]
    save(again, 3)
    again.close()
    assert CheckpointStore(store.folder, read_only=True).select() == 3


def test_readers_skip_a_corrupt_checkpoint_and_leave_it_where_it_is(store, caplog):
    shutil.rmtree(store.path(2) / "step")
    readers = CheckpointStore(store.folder, read_only=True)
    assert readers.select() == 1
    assert "It is skipped; step 1 is used instead" in caplog.text
    assert store.path(2).exists()


@pytest.mark.parametrize("request_", [{"step": 2}, {"best": True}])
def test_a_corrupt_checkpoint_that_is_requested_is_an_error(store, request_):
    store.retention = Retention(monitor="loss")
    file = store.path(2) / "params" / "manifest.ocdbt"
    file.write_bytes(flipped(file.read_bytes(), 20))
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint_2 is corrupt: params/manifest\.ocdbt .*of \[1\]"):
        store.select(**request_)
    with pytest.raises(ValueError, match=r"checkpoint_2 could not be read \(params/manifest\.ocdbt "):
        store.restore(2, state(0))


def test_nothing_starts_from_nothing_where_all_checkpoints_are_corrupt(store):
    for step in (1, 2):
        shutil.rmtree(store.path(step) / "step")
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint_1 is corrupt: step/.* is missing.*no other"):
        store.select()
    store.close()
    with pytest.raises(CorruptCheckpointError, match=r"are corrupt \(corrupt-checkpoint_1, corrupt-checkpoint_2\)"):
        CheckpointStore(store.folder).select()


def test_reading_parameters_verifies_only_parameters(store):
    for part in ("opt_state", "step", "rng"):
        shutil.rmtree(store.path(2) / part)
    assert store.select(items={"params", "metadata"}) == 2
    assert_same(store.restore(2, {"params": state(0)["params"]}), {"params": state(2)["params"]})
    assert store.select() == 1


def without_checksums(store, step):
    """Make a checkpoint look like those of older versions."""
    path = store.path(step)
    (path / CHECKSUMS_FILE).unlink()
    metadata = json.loads((path / "metadata" / "metadata").read_text())
    del metadata["checksums"]
    (path / "metadata" / "metadata").write_text(json.dumps(metadata))


def test_older_checkpoints_without_checksums_load_with_a_notice(store, caplog):
    without_checksums(store, 2)
    with caplog.at_level(logging.INFO):
        assert store.select() == 2
    assert_same(store.restore(2, state(0)), state(2))
    assert "checkpoint_2 has no checksums: it is read without verification" in caplog.text


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_an_older_checkpoint_lacks_is_noticed(store, part):
    without_checksums(store, 2)
    shutil.rmtree(store.path(2) / part)
    assert f"{part} is missing" in store.problem(2)


def test_parts_that_a_run_did_not_save_are_not_missing(store):
    without_checksums(store, 2)
    RUN_WITHOUT = {"trainer": {"callbacks": [{"save_optimizer_state": False, "save_dataloader_state": False}]}}
    (store.path(2) / "metadata" / "metadata").write_text(json.dumps(RUN_WITHOUT))
    for part in ("opt_state", "data"):
        shutil.rmtree(store.path(2) / part)
    assert store.problem(2) is None


def test_checksums_can_be_left_out(tmp_path):
    store = CheckpointStore(tmp_path, checksums=False, use_async=False)
    save(store, 1)
    assert not (store.path(1) / CHECKSUMS_FILE).exists()
    store.close()
    assert CheckpointStore(tmp_path, read_only=True).select() == 1


def test_without_verification_only_missing_parts_are_found(store):
    blind = CheckpointStore(store.folder, read_only=True, checksums=False)
    file = store.path(2) / "callbacks"
    file.mkdir()
    assert blind.problem(2) is None
    shutil.rmtree(store.path(2) / "rng")
    assert "rng is missing" in blind.problem(2)


def test_corrupt_metrics_make_no_checkpoint_the_best(store, caplog):
    save(store, 3)
    store.save_metrics(3, {"loss": 4.0})
    store.close()
    file = store.path(2) / "metrics" / "metrics"
    file.write_text(file.read_text().replace("3.0", "9.0"))
    again = CheckpointStore(store.folder, read_only=True, retention=Retention(monitor="loss"))
    assert again.best() == 3
    assert "checkpoint_2 cannot be the best checkpoint, as metrics/metrics does not have the bytes" in caplog.text


@pytest.mark.parametrize("damaged", [CHECKSUMS_FILE, "metadata/metadata"])
def test_the_best_checkpoint_is_found_although_the_newest_has_no_valid_metadata(store, damaged):
    store.retention = Retention(monitor="loss")
    save(store, 3, 4)
    store.close()
    (store.path(4) / damaged).write_text("{")
    assert CheckpointStore(store.folder, read_only=True).best() == 2


def test_other_checkpoints_are_read_although_metrics_are_no_json(store):
    (store.path(2) / "metrics" / "metrics").write_bytes(b'{"loss": 3.0, \xff')
    again = CheckpointStore(store.folder, retention=Retention(max_to_keep=2))
    assert again.problem(2).startswith("metrics/metrics has")
    assert again.select() == 1
    again.adopt()
    save(again, 3, 4)
    again.close()
    assert CheckpointStore(store.folder, read_only=True).steps() == [3, 4]


def test_an_older_checkpoint_whose_metrics_are_no_json_is_dropped_as_any_other(store):
    store.save_metrics(1, {"loss": 4.0})
    store.close()
    (store.path(1) / "metrics" / "metrics").write_text("{")
    again = CheckpointStore(store.folder, retention=Retention(max_to_keep=2), use_async=False)
    assert again.select() == 2
    again.adopt()
    save(again, 3, 4)
    assert again.steps() == [3, 4]
    again.close()


@pytest.mark.parametrize("num_written", [0, 1, 2])
@pytest.mark.parametrize("has_metrics", [False, True])
def test_a_kill_while_metrics_are_added_leaves_a_valid_checkpoint(store, monkeypatch, num_written, has_metrics):
    step, before = (2, {"loss": 3.0}) if has_metrics else (1, {})
    count = 0

    def write_or_die(file, text):
        nonlocal count
        count += 1
        if count > num_written:
            raise KeyboardInterrupt
        files.write_atomically(file, text)

    monkeypatch.setattr(checksums, "write_atomically", write_or_die)
    with pytest.raises(KeyboardInterrupt):
        store.save_metrics(step, {"loss": 2.5})
    assert store.problem(step) is None
    assert store.read_document(step, "metrics") == ({"loss": 2.5} if num_written == 2 else before)
    monkeypatch.undo()
    store.save_metrics(step, {"loss": 1.5})
    assert store.problem(step) is None
    assert store.read_document(step, "metrics") == {"loss": 1.5}


def test_checksums_are_sizes_and_sha256(store):
    content = (store.path(1) / "params" / "manifest.ocdbt").read_bytes()
    listed = json.loads((store.path(1) / CHECKSUMS_FILE).read_text())["items"]["params"]["manifest.ocdbt"]
    assert listed == [f"{len(content)}:{hashlib.sha256(content).hexdigest()}"]
