"""Eight simulated devices or one GPU, checked shapes, and one compilation cache for the whole run."""

import atexit
import gc
import importlib.metadata
import logging
import os
import shutil
import tempfile
from pathlib import Path

has_platforms = "JAX_PLATFORMS" in os.environ
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

GPU_WORKERS = 6
"""Processes of `pytest -m gpu` that share the GPU, unless `-n` is given: most of the time they compile on the CPU."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Start several workers where `pytest -m gpu` has a GPU."""
    can_distribute = getattr(config.option, "numprocesses", 0) is None and not config.option.collectonly
    if config.option.markexpr == "gpu" and can_distribute and any(Path("/dev").glob("nvidia[0-9]*")):
        config.option.numprocesses = GPU_WORKERS


def pytest_configure(config):
    """Let `pytest -m gpu` use the GPU, with an equal share of its memory for each worker; JAX has not started yet."""
    if config.option.markexpr != "gpu":
        return
    if not has_platforms:  # Workers inherit the choice.
        os.environ["JAX_PLATFORMS"] = ""
        jax.config.update("jax_platforms", None)
    # Kernels run beside code as users have it.
    os.environ["XLA_FLAGS"] = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if flag not in QUICK)
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if num_workers > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / num_workers:.3f}")


def pytest_collection_modifyitems(items):
    """Skip the tests that need a GPU where there is none, and say why."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason

        if problem := hopper_unavailable_reason():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {problem}"))


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
