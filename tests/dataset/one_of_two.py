"""One of two processes that read the same data: python one_of_two.py INDEX PORT FOLDER.

Goes on from FOLDER/state.json, and writes the rows that lie on its devices and the state after them.
"""

import json
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from dataset.test_processes import NUM_STEPS, read_data
from jax.sharding import Mesh

index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def main():
    """Read some batches."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    iterator = read_data(folder, Mesh(np.array(jax.devices()).reshape(2, 2), ("dp", "fsdp")), num_workers=index)
    iterator.set_state(json.loads((folder / "state.json").read_text()))
    rows = {}
    for step in range(NUM_STEPS):
        for shard in next(iterator).targets.addressable_shards:
            start = shard.index[0].start or 0
            rows[f"{step} {start}"] = np.asarray(shard.data)
    np.savez(folder / f"rows_{index}.npz", **rows)
    (folder / f"state_{index}.json").write_text(json.dumps(iterator.get_state()))


if __name__ == "__main__":
    main()
