"""Pallas Mosaic GPU, of no type that could be checked, and what differs between the versions of JAX."""

import importlib
from typing import Any

import jax

pl: Any = importlib.import_module("jax.experimental.pallas")
plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")


def store(ref: Any, value: jax.Array) -> None:
    """Write numbers wherever they are, in sectors of 32 bytes or less: from jax 0.12 on, a plain store refuses less."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
