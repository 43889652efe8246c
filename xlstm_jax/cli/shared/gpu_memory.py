"""Set the share of GPU memory that JAX may use, from the driver's report, before JAX starts."""

import ctypes
import os
from typing import Any, NamedTuple

GIB = 2**30
VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX 0.10 to 0.12 read this name and `XLA_CLIENT_MEM_FRACTION`, and refuse to start with both."""
JAX_DEFAULT = 0.75
LARGEST_FRACTION = 0.95
RESERVED_BYTES = 2 * GIB
"""Memory used outside JAX's pool: CUDA context, loaded kernels, workspaces of cuBLAS and cuDNN, NCCL buffers."""
SHARED_BY_MPS = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")


class GPU(NamedTuple):
    """An NVIDIA GPU as its driver reports it."""

    name: str
    memory: int
    """Bytes."""


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def list_gpus() -> list[GPU]:
    """Return the NVIDIA GPUs of this machine, regardless of `CUDA_VISIBLE_DEVICES`; none without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [gpu for index in range(count.value) if (gpu := _describe(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def _describe(nvml: Any, index: int) -> GPU | None:
    handle, name, memory = ctypes.c_void_p(), ctypes.create_string_buffer(96), _Memory()
    failed = (
        nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle))
        or nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
        or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    )
    return None if failed else GPU(name.value.decode(), memory.total)


def set_memory_fraction() -> None:
    """Let JAX use up to 95 % of a GPU's memory instead of its default of 75 %. Call it before JAX is first used.

    Nothing changes if the environment configures JAX's memory in any way, keeps JAX off the GPUs, or shares a GPU
    between processes (MIG, limits of MPS).
    """
    if any(name.startswith(("XLA_PYTHON_CLIENT_", "XLA_CLIENT_")) or name in SHARED_BY_MPS for name in os.environ):
        return
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return
    if "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return
    if gpus := list_gpus():
        os.environ[VARIABLE] = f"{choose_fraction(min(gpu.memory for gpu in gpus)):.2f}"


def choose_fraction(memory: int) -> float:
    """Return the fraction of a GPU's memory for JAX's pool that leaves room for allocations outside the pool."""
    return max(JAX_DEFAULT, min(LARGEST_FRACTION, int(100 * (1 - RESERVED_BYTES / memory)) / 100))


def current_fraction() -> float:
    """Return the fraction of a GPU's memory that JAX is configured to use."""
    given = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get(VARIABLE)
    return float(given) if given else JAX_DEFAULT
