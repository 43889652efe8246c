"""One of two processes that resolve `performance: auto` for devices with different memories.

python one_of_two.py INDEX PORT FOLDER GIB_OF_THE_FIRST GIB_OF_THE_SECOND
"""

import json
import sys
from pathlib import Path

import jax

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.performance import Devices, resolve_performance
from xlstm_jax.recipes.run_config import build_run

index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
RUN = ["data=synthetic", "model=xlstm_160m", "batch_size=16", "context_length=8192", "num_train_steps=50000"]


def main():
    """Write what was chosen, or the error."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    settings = compose(RUN)
    devices = Devices("gpu", "NVIDIA H200", {"dp": 2, "fsdp": 1, "pp": 1, "tp": 1}, int(sys.argv[4 + index]) * 2**30)
    try:
        result = resolve_performance(build_run(settings), settings, devices, folder / f"run_{index}").settings
    except ConfigError as error:
        result = str(error)
    (folder / f"{index}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
