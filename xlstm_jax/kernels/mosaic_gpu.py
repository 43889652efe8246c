"""Pallas Mosaic GPU, of no type that could be checked: its signatures differ between the versions of JAX."""

import importlib
from typing import Any

pl: Any = importlib.import_module("jax.experimental.pallas")
plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
