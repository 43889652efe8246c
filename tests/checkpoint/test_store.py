"""Checkpoints in a folder: what was saved comes back on every mesh, and nothing half written does."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.states import (
    ADAMW,
    CONFIG,
    MIXED,
    UNROLLED,
    assert_laid_out_alike,
    assert_same,
    host,
    make_state,
    parts,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh

from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.store import CheckpointNotFoundError, CheckpointNotWrittenError, CheckpointStore
from xlstm_jax.models.shared import layout as model_layout

pytestmark = pytest.mark.slow

MESHES = {"dp8": {"dp": 8}, "fsdp8": {"fsdp": 8}, "dp2-fsdp2-tp2": {"dp": 2, "fsdp": 2, "tp": 2}}
NO_CONFIGS = {"metadata": {}}


@pytest.fixture
def store(tmp_path):
    """A store that writes before it returns."""
    store = CheckpointStore(tmp_path / "checkpoints", use_async=False)
    yield store
    store.close()


def small(value):
    """A state of one parameter."""
    return {"params": {"kernel": jnp.full((2, 3), value, jnp.float32)}, "step": jnp.int32(value)}


def save_small(store, *steps):
    for step in steps:
        store.save(step, small(step), NO_CONFIGS)


@pytest.mark.parametrize("written_on", MESHES)
def test_a_state_comes_back_bit_for_bit_on_every_mesh(store, written_on):
    state = parts(make_state(**MESHES[written_on]))
    store.save(3, state, NO_CONFIGS)
    for sizes in MESHES.values():
        like = parts(make_state(seed=1, **sizes))
        result = store.restore(3, like)
        assert_same(result, state)
        assert_laid_out_alike(result, like)


def test_scanned_blocks_are_read_by_a_model_that_does_not_scan(store):
    state = make_state(fsdp=8)
    store.save(3, parts(state), NO_CONFIGS)
    like = parts(make_state(seed=1, config=UNROLLED, dp=2, fsdp=2, tp=2))
    result = store.restore(3, like)
    assert_laid_out_alike(result, like)
    assert_same(result["params"], model_layout.to_canonical(host(state.params), CONFIG.kinds, scan=True))


def test_blocks_of_several_kinds_come_back(store):
    state = parts(make_state(config=MIXED, fsdp=8))
    store.save(3, state, NO_CONFIGS)
    assert_same(store.restore(3, parts(make_state(seed=1, config=MIXED, dp=8))), state)


def test_a_restored_state_needs_no_new_compilation(store):
    state = make_state(dp=2, fsdp=2, tp=2)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)
    step = on_mesh(lambda s: s.replace(step=s.step + 1), make_mesh(dp=2, fsdp=2, tp=2), (specs,), specs)
    state = step(step(state))
    store.save(2, parts(state), NO_CONFIGS)
    num_programs = step._cache_size()
    step(state.replace(**store.restore(2, parts(state))))
    assert step._cache_size() == num_programs


def test_what_is_saved_is_the_state_at_the_time_of_the_call(tmp_path):
    store = CheckpointStore(tmp_path, use_async=True)
    rows = NamedSharding(make_mesh(fsdp=8), P("fsdp"))
    kernel = np.random.default_rng(0).normal(size=(8, 1_000_000)).astype(np.float32)
    state = {"params": {"kernel": jax.device_put(kernel, rows)}}
    store.save(1, state, NO_CONFIGS)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    jax.block_until_ready(overwrite(state))
    result = store.restore(1, {"params": {"kernel": jax.device_put(np.zeros_like(kernel), rows)}})
    assert_same(result, {"params": {"kernel": kernel}})
    store.close()


def test_the_old_state_can_make_room_for_the_new_one(store):
    state = parts(make_state(fsdp=8))
    store.save(1, state, NO_CONFIGS)
    like = parts(make_state(seed=1, fsdp=8))
    assert_same(store.restore(1, like, free=["params"]), state)
    assert all(x.is_deleted() for x in jax.tree.leaves(like["params"]))


def test_shapes_without_places_are_read_as_numpy_arrays(store):
    save_small(store, 5)
    like = {"params": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)}}
    kernel = store.restore(5, like)["params"]["kernel"]
    assert isinstance(kernel, np.ndarray)
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(kernel.astype(np.float32), np.full((2, 3), 5))


def test_further_trees_and_documents_come_back(store):
    arrays = small(1) | {"ema_params": {"kernel": jnp.full((2, 3), 7.0)}, "opt_state": (), "rng": None}
    store.save(1, arrays, {"metadata": {"model": {"vocab_size": 3}}, "data": {"loaders": {"train": [4]}}})
    assert store.contents(1) == {"params", "step", "ema_params", "metadata", "data"}
    assert_same(store.restore(1, arrays)["ema_params"], arrays["ema_params"])
    assert store.read_document(1, "data") == {"loaders": {"train": [4]}}
    assert store.read_document(1, "run") == {}
    metadata = json.loads((store.path(1) / "metadata" / "metadata").read_text())
    assert metadata["version"] == 1
    assert metadata["model"] == {"vocab_size": 3}


@pytest.mark.parametrize("use_async", [True, False])
def test_the_newest_the_best_and_every_tenth_are_kept(tmp_path, use_async):
    retention = Retention(max_to_keep=2, keep_every=10, monitor="loss", mode="min")
    store = CheckpointStore(tmp_path, retention=retention, use_async=use_async)
    for step, loss in [(4, 3.0), (8, 1.0), (10, 2.0), (12, float("nan")), (16, None), (18, 1.5)]:
        save_small(store, step)
        if loss is not None:
            store.save_metrics(step, {"loss": loss, "accuracy": -loss})
    assert store.steps() == [8, 10, 16, 18]
    assert (store.latest(), store.best()) == (18, 8)
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint_{step}" for step in (8, 10, 16, 18)}
    again = CheckpointStore(tmp_path, retention=Retention(monitor="accuracy", mode="max"))
    assert again.best() == 8
    assert CheckpointStore(tmp_path, read_only=True).best() == 8
    assert_same(again.restore(8, small(0)), small(8))
    again.close()


def test_no_checkpoint_is_dropped_before_the_next_is_whole(tmp_path):
    store = CheckpointStore(tmp_path, retention=Retention(max_to_keep=1))
    save_small(store, 1)
    store.wait()
    save_small(store, 2)
    assert (tmp_path / "checkpoint_1").exists()
    assert store.steps() == [2]
    assert not (tmp_path / "checkpoint_1").exists()
    store.close()


def test_a_checkpoint_that_the_disk_has_no_room_for_is_not_begun(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save_small(store, 1)
    store.wait()
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    needed = (
        r"checkpoint_2 could not be written \(it needs 0\.0 MiB, but the disk has 0\.0 MiB\); the last whole one is "
    )
    with pytest.raises(CheckpointNotWrittenError, match=f"{needed}of step 1"):
        save_small(store, 2)
    assert store.steps() == [1]
    assert store.problem(1, None) is None
    assert not list(tmp_path.glob("checkpoint_2*"))
    store.close()


def test_a_checkpoint_that_could_not_be_written_is_reported_and_not_listed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("No space left on device")

    store = CheckpointStore(tmp_path)
    save_small(store, 1)
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr("etils.epath.backend._OsPathBackend.rename", fail)
        save_small(store, 2)
        with pytest.raises(
            CheckpointNotWrittenError,
            match=r"checkpoint_2 could not be written .No space.*; the last whole one is of step 1",
        ):
            store.wait()
    assert store.steps() == [1]
    save_small(store, 3)
    assert store.steps() == [1, 3]
    store.close()


def test_a_store_can_be_used_after_it_was_closed(store):
    save_small(store, 1)
    store.close()
    save_small(store, 2)
    store.close()
    assert_same(store.restore(1, small(0)), small(1))


def test_a_run_that_went_back_goes_on_from_its_own_checkpoint(store):
    store.retention = Retention(max_to_keep=2)
    save_small(store, 50, 100, 60)
    assert (store.steps(), store.latest()) == ([60, 100], 60)
    store.close()
    assert store.latest() == 60
    save_small(store, 100)
    assert store.latest() == 100


def test_a_checkpoint_of_an_earlier_run_is_replaced(store, caplog):
    save_small(store, 1)
    store.save(1, small(7), NO_CONFIGS)
    assert_same(store.restore(1, small(0)), small(7))
    assert "Replacing" in caplog.text


def test_what_is_half_written_or_half_deleted_is_not_listed_and_goes_away(store):
    save_small(store, 1)
    store.close()
    halves = [f"checkpoint_2{suffix}" for suffix in (".orbax-checkpoint-tmp", ".orbax-checkpoint-tmp-deleted")]
    for half in halves:
        shutil.copytree(store.path(1), store.folder / half)
    readers = CheckpointStore(store.folder, read_only=True)
    assert readers.steps() == [1]
    assert all((store.folder / half).exists() for half in halves)
    assert store.steps() == [1]
    save_small(store, 3)
    assert [path.name for path in store.folder.iterdir() if "tmp" in path.name] == []


def test_a_reader_creates_no_folder(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .*runs"):
        CheckpointStore(tmp_path / "runs", read_only=True).resolve()
    assert not (tmp_path / "runs").exists()


def test_a_step_without_checkpoint_is_refused_with_those_that_have_one(store):
    save_small(store, 1, 3)
    with pytest.raises(CheckpointNotFoundError, match=r"step 2 in .*, only of the steps \[1, 3\]"):
        store.restore(2, small(0))


def test_without_the_monitored_metric_none_is_the_best(store):
    save_small(store, 1)
    assert store.best() == 1
    store.retention = Retention(monitor="loss")
    with pytest.raises(CheckpointNotFoundError, match=r"monitored metric.*\[1\]"):
        store.resolve(best=True)


def test_a_checkpoint_of_another_model_is_refused_with_what_does_not_fit(store):
    store.save(1, parts(make_state(fsdp=8)), NO_CONFIGS)
    other = {"params": make_state(config=MIXED, fsdp=8).params}
    with pytest.raises(ValueError, match=r"arrays are not in the checkpoint \(block_stack\.block_2\..+ another model"):
        store.restore(1, other)
    wider = small(0) | {"params": {"kernel": jnp.ones((2, 4))}}
    save_small(store, 2)
    with pytest.raises(ValueError, match=r"1 arrays are of another shape \(kernel \[2, 3\] instead of \[2, 4\]\)"):
        store.restore(2, wider, free=["params"])
    assert not wider["params"]["kernel"].is_deleted()


def test_the_state_of_another_optimizer_is_refused_with_the_way_out(store):
    store.save(1, parts(make_state()), NO_CONFIGS)
    other = parts(make_state(optimizer=dataclasses.replace(ADAMW, grad_clip_norm=None)))
    with pytest.raises(ValueError, match=r"opt_state of .* another optimizer.*load_optimizer=False"):
        store.restore(1, other)


def test_a_tree_that_was_not_saved_is_refused(store):
    save_small(store, 1)
    with pytest.raises(ValueError, match="holds no opt_state, only metadata, params, step"):
        store.restore(1, small(0) | {"opt_state": {"mu": jnp.zeros(3)}})


def test_a_random_key_of_another_kind_is_refused(store):
    store.save(1, small(1) | {"rng": jax.random.key(0)}, NO_CONFIGS)
    with pytest.raises(ValueError, match=r"kind threefry2x32, here it is rbg.*jax_default_prng_impl"):
        store.restore(1, small(1) | {"rng": jax.random.key(0, impl="rbg")})


@pytest.mark.parametrize("damaged", ["params/_METADATA", "metadata/metadata", "params/d"])
def test_a_damaged_checkpoint_is_refused_with_the_others(store, damaged):
    save_small(store, 1, 2)
    store.close()
    path = store.path(2) / damaged
    for file in path.iterdir() if path.is_dir() else [path]:
        file.write_bytes(file.read_bytes()[: file.stat().length // 2])
    with pytest.raises(ValueError, match=r"checkpoint_2 could not be read .*there are \[1\]"):
        store.restore(2, small(0))
    assert_same(store.restore(1, small(0)), small(1))


def test_a_layout_of_the_future_is_refused(store):
    save_small(store, 1)
    store.save_document(1, "metadata", {"version": 2})
    with pytest.raises(ValueError, match=r"version 2.*update"):
        store.read_metadata(1)


@pytest.mark.parametrize("folder", ["s3://bucket/run", "gs:/bucket/run"])
def test_a_place_that_cannot_be_written_to_is_refused(folder):
    with pytest.raises(ValueError, match="local folders and on Google Cloud Storage"):
        CheckpointStore(folder)


def test_a_remote_path_keeps_its_slashes():
    assert str(CheckpointStore("gs://bucket/run").path(3)) == "gs://bucket/run/checkpoint_3"


def test_what_a_killed_process_had_begun_to_delete_is_gone_after_opening(tmp_path):
    (tmp_path / "deleted-checkpoint_3" / "params").mkdir(parents=True)
    store = CheckpointStore(tmp_path)
    assert store.steps() == []
    assert not (tmp_path / "deleted-checkpoint_3").exists()
    store.close()
