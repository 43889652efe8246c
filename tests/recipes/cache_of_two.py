"""One of two processes of a run that enable the compilation cache: `cache_of_two.py INDEX PORT FOLDER FOLDER`."""

import os
import sys

import jax

from xlstm_jax.recipes.compilation_cache import enable_compilation_cache

index, port, *folders = sys.argv[1:]
os.environ["XLSTM_JAX_CACHE_DIR"] = folders[int(index)]
jax.config.update("jax_compilation_cache_dir", None)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
jax.devices()
jax.default_backend = lambda: "gpu"  # a cache is for GPUs only
enable_compilation_cache()
sys.stdout.write(f"process {index}: {jax.config.jax_compilation_cache_dir}\n")
