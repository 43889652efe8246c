"""Fill heads up with zeros to a size that there is a kernel for."""

import jax
import jax.numpy as jnp


def pad_to(x: jax.Array, *sizes: int) -> jax.Array:
    """Make the last axes of an array longer, by zeros behind what is there."""
    missing = [size - given for size, given in zip(sizes, x.shape[-len(sizes) :], strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(sizes)) + [(0, more) for more in missing]) if any(missing) else x
