"""Zero-pad heads to a size that has a kernel."""

import jax
import jax.numpy as jnp


def pad_to(x: jax.Array, *sizes: int) -> jax.Array:
    """Zero-pad the last axes of an array to these sizes."""
    missing = [size - given for size, given in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(sizes)) + [(0, more) for more in missing]) if any(missing) else x
