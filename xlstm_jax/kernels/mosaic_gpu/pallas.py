"""Untyped handles to Pallas Mosaic GPU, and shims for differences between JAX versions."""

import importlib
from typing import Any, TypeAlias

import jax

pl: Any = importlib.import_module("jax.experimental.pallas")
plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

Ref: TypeAlias = Any
"""A reference to global or shared memory, a view of one, or a barrier, whose types are private in JAX."""
Index: TypeAlias = jax.Array | int
"""An integer, static or traced."""
Slice: TypeAlias = Any
"""A slice `pl.ds(start, size)` of a reference."""
Interpret: TypeAlias = Any
"""`None` to run on a GPU, `InterpretGPUParams` of Pallas to simulate one on a CPU."""


def store(ref: Ref, value: jax.Array) -> None:
    """Store an array of any layout; from jax 0.12 on, a plain store raises an error for sectors below 32 bytes."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
