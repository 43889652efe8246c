"""Eight simulated devices, checked shapes, and one compilation cache for the whole run."""

import atexit
import gc
import importlib.metadata
import logging
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a run goes into compiling programs that then run for milliseconds. Flags from outside come later, and count.
QUICK = ["--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # Newer ones have no other emitters, and not this flag.
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
DEVICES = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", ""), DEVICES])
# Traces are millions of objects that live on: to look through them takes a tenth of a run.
gc.set_threshold(50_000, 20, 100)
# Devices wait for each other in threads; with few of them, jaxlib 0.10 lets all threads wait at once.
os.environ["PJRT_NPROC"] = "64"

# The first process of a run makes the cache, its workers inherit it, and nothing outlives the run. With a size limit,
# JAX locks the cache: without one, a worker can read an entry that another has half written.
if "PYTEST_XDIST_WORKER" not in os.environ:
    cache = tempfile.mkdtemp(prefix="xlstm_jax_test_cache_")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2**32)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

from jaxtyping import install_import_hook

install_import_hook("xlstm_jax", "annotations.checked")

import jax
import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def heard_logger(monkeypatch):
    """Let the package's messages reach the root logger, whatever an earlier test did to them."""
    monkeypatch.setattr(logging.getLogger("xlstm_jax"), "propagate", True)


@pytest.fixture
def key() -> jax.Array:
    """The random key that a test starts from."""
    return jax.random.key(0)


@pytest.fixture
def unchecked_shapes():
    """Switch the checks of annotations off, to reach the package's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
