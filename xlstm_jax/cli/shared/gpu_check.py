"""Detect why JAX does not use this machine's GPUs or the kernels written for them, and suggest a fix."""

import os
import sys

import jax

from xlstm_jax.cli.shared.gpu_memory import list_gpus
from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX
from xlstm_jax.utils.accelerators import HOPPER_KINDS

PYTHON = sys.version_info[:2]
NEEDED_PYTHON = (3, 12)
"""The oldest Python with a JAX version that the kernels can use; on Python 3.11, pip installs jax 0.10, which is too
old."""


def gpu_problem() -> str | None:
    """Return a sentence on why this machine's GPUs are not fully used, and the fix; `None` if there is no problem."""
    kinds = [device.device_kind for device in jax.local_devices() if device.platform == "gpu"]
    if kinds:
        return _kernel_problem(kinds[0])
    if os.environ.get("JAX_PLATFORMS") or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None  # The user chose the CPU.
    names = [gpu.name for gpu in list_gpus()]
    if not names:
        return None
    python = f" with Python {_text(NEEDED_PYTHON)} or newer" if _is_hopper(names[0]) and PYTHON < NEEDED_PYTHON else ""
    return f"JAX does not use the {names[0]} of this machine: install the extra cuda12 or cuda13{python}."


def _kernel_problem(kind: str) -> str | None:
    if not _is_hopper(kind) or jax.__version_info__ >= NEEDED_JAX:
        return None
    newer = f"install the package in an environment with Python {_text(NEEDED_PYTHON)} or newer"
    way_out = "pip install -U jax" if PYTHON >= NEEDED_PYTHON else newer
    return (
        f"The fast kernels for this {kind} need jax {_text(NEEDED_JAX)} or newer, and this is jax {jax.__version__} "
        f"on Python {_text(PYTHON)}: {way_out}."
    )


def _is_hopper(kind: str) -> bool:
    return kind.startswith(HOPPER_KINDS)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
