"""Saves a checkpoint after the other until it is killed: `saving_forever.py <folder> <async or sync>`."""

import sys

import jax.numpy as jnp
from etils import epath

from xlstm_jax.checkpoint.files import write_atomically
from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.store import CheckpointStore


def arrays(step):
    """Return arrays that tell the step they were saved at."""
    params = {f"kernel_{i}": jnp.full((64, 64), step * 100 + i, jnp.float32) for i in range(8)}
    return {"step": jnp.int32(step), "params": params}


def main(folder, mode):
    """Go on after the last checkpoint in the folder."""
    store = CheckpointStore(folder, retention=Retention(max_to_keep=2, keep_every=7), use_async=mode == "async")
    step = store.latest() or 0
    while True:
        step += 1
        store.save(step, arrays(step), {"metadata": {"step": step}, "data": {"loaders": {"train": [step]}}})
        store.save_metrics(step, {"loss": 1 / step})
        write_atomically(epath.Path(folder) / "progress", str(step))


if __name__ == "__main__":
    main(*sys.argv[1:])
