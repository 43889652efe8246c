"""Limits of the sLSTM's kernels for Hopper GPUs, as plain integers."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason

HEAD_DIMS = (64, 128, 192)
FEWEST_UNITS = 32
"""Units of the smallest head that is padded to a supported size."""
ROWS = 8
"""Sequences per thread block: the smallest width of a matmul on tensor cores."""
SAVED = 6
"""The number of arrays saved per position: the lead of the input gate, log sigmoid(-f), z, the pre-activation of o, and
the cell and normaliser before the position."""
MAX_CELLS = 2**31 // SAVED
"""Offsets have 32 bits."""


def kernel_dim(head_dim: int) -> int:
    """Return the number of units to which the kernels pad a head, if they support it."""
    return next((units for units in HEAD_DIMS if units >= head_dim), head_dim)


def mosaic_problem(head_dim: int, recurrent_dtype: DTypeLike, state_dtype: DTypeLike, num_cells: int) -> str | None:
    """Return why the kernels cannot be used here, or `None` if they can; arguments as of `choose_backend`."""
    if problem := hopper_unavailable_reason():
        return problem
    if jnp.dtype(recurrent_dtype) != jnp.bfloat16:
        given = jnp.dtype(recurrent_dtype).name
        return f"the kernel for Hopper GPUs multiplies in bfloat16, and the recurrent kernel is in {given}"
    if jnp.dtype(state_dtype) != jnp.float32:
        given = jnp.dtype(state_dtype).name
        return f"the kernel for Hopper GPUs keeps its memory in float32, and these gates need {given}"
    if not FEWEST_UNITS <= head_dim <= HEAD_DIMS[-1]:
        sizes = f"{FEWEST_UNITS} to {HEAD_DIMS[-1]} units"
        return f"the kernel for Hopper GPUs is for heads of {sizes}, and these have {head_dim}"
    if num_cells > MAX_CELLS:
        return f"the kernel for Hopper GPUs takes at most {MAX_CELLS:,} cells, and these are {num_cells:,}"
    return None
