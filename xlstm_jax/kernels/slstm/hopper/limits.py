"""What the sLSTM's kernels for Hopper GPUs can compute; this module takes no newer JAX than the rest."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason

HEAD_DIMS = (64, 128, 192)
FEWEST_UNITS = 32
"""Of a head that is filled up with zeros to one of these sizes."""
ROWS = 8
"""Sequences in a block: the least width of a tensor-core product."""
SAVED = 6
"""Kept of each position: the lead of the input gate, log sigmoid(-f), z, the pre-activation of o, and cell and
normaliser as it found them."""
MAX_CELLS = 2**31 // SAVED
"""Places in memory are counted in 32 bits."""


def kernel_dim(head_dim: int) -> int:
    """Return the units that a head has for the kernels, where they can compute it."""
    return next((units for units in HEAD_DIMS if units >= head_dim), head_dim)


def mosaic_problem(head_dim: int, recurrent_dtype: DTypeLike, state_dtype: DTypeLike, num_cells: int) -> str | None:
    """Return why the kernels cannot compute this here, or `None` if they can; arguments as of `choose_backend`."""
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
