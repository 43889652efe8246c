"""Availability of the kernels for NVIDIA Hopper GPUs."""

import functools

import jax

NEEDED_JAX = (0, 11)
HOPPER = "9.0"
"""The compute capability of H100 and H200."""


@functools.cache
def hopper_unavailable_reason() -> str | None:
    """Return why kernels for Hopper GPUs cannot run on this device, or `None` if they can."""
    if jax.default_backend() != "gpu":
        return f"this {jax.default_backend().upper()} is not a Hopper GPU"
    if getattr(jax.devices()[0], "compute_capability", None) != HOPPER:
        return f"this {jax.devices()[0].device_kind} is not a Hopper GPU"
    if jax.__version_info__ < NEEDED_JAX:
        return f"the kernels for Hopper GPUs need jax 0.11 or newer, and this is {jax.__version__}"
    return None


def has_needed_jax() -> bool:
    """Return whether JAX is new enough for the kernels; planning a run on a CPU does not need that."""
    return jax.__version_info__ >= NEEDED_JAX or jax.default_backend() != "gpu"
