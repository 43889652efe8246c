"""Checkpoints on remote storage go through the same code as local ones."""

import sys
from types import ModuleType, SimpleNamespace

import fsspec
import jax
import jax.numpy as jnp
import pytest
from checkpoint.bucket import BucketFileSystem, serve
from checkpoint.states import assert_same
from etils.epath import backend
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.store import CheckpointStore

FOLDER = "gs://bucket/run/checkpoints"


@pytest.fixture
def bucket(monkeypatch):
    """An empty bucket."""
    google = ModuleType("google.cloud")
    google.storage = SimpleNamespace(Client=lambda: SimpleNamespace(get_bucket=lambda _: None))
    monkeypatch.setitem(sys.modules, "google.cloud", google)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
    fsspec.register_implementation("gcs", BucketFileSystem, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    BucketFileSystem.store.clear()
    with serve() as address:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", address)
        yield BucketFileSystem()


def sharded(value):
    """A state on eight devices."""
    kernel = jax.device_put(jnp.full((8, 3), value, jnp.float32), NamedSharding(make_mesh(fsdp=8), P("fsdp")))
    return {"params": {"block_stack": {"block": {"kernel": kernel}}}, "step": jnp.int32(value)}


def test_remote_checkpoints_are_written_kept_read_and_dropped(bucket):
    store = CheckpointStore(FOLDER, retention=Retention(max_to_keep=1, monitor="loss"))
    for step in (1, 2, 3):
        store.save(step, sharded(step), {"metadata": {}, "data": {"loaders": {"train": [step]}}})
        store.save_metrics(step, {"loss": [0.0, 2.0, 1.0, 3.0][step]})
    assert (store.steps(), store.latest(), store.best()) == ([2, 3], 3, 2)
    assert_same(store.restore(2, sharded(0)), sharded(2))
    assert store.read_document(3, "data") == {"loaders": {"train": [3]}}
    store.close()
    assert not any("checkpoint_1" in name for name in bucket.store)


def test_what_is_not_whole_on_remote_storage_is_not_listed(bucket):
    store = CheckpointStore(FOLDER)
    store.save(1, sharded(1), {"metadata": {}})
    store.close()
    bucket.rm_file(f"{FOLDER}/checkpoint_1/commit_success.txt")
    assert CheckpointStore(FOLDER, read_only=True).steps() == []
