"""Pallas Mosaic GPU, which is imported untyped, and what differs between the versions of JAX."""

import importlib
from typing import Any, TypeAlias

import jax

pl: Any = importlib.import_module("jax.experimental.pallas")
plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")

Ref: TypeAlias = Any
"""A reference to global or shared memory, a view of one, or barriers: the types of these are private in JAX."""
Index: TypeAlias = jax.Array | int
"""A whole number, known when the kernel is traced or only when it runs."""
Slice: TypeAlias = Any
"""A slice `pl.ds(start, size)` of a reference."""
Interpret: TypeAlias = Any
"""`None` to run on a GPU, `InterpretGPUParams` of Pallas to simulate one on a CPU."""


def store(ref: Ref, value: jax.Array) -> None:
    """Store an array of any layout, in sectors of 32 bytes or less: from jax 0.12 on, a plain store refuses less."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
