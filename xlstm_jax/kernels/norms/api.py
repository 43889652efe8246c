"""Public functions for norms: fused kernels where available, plain JAX elsewhere."""

import logging
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
from xlstm_jax.kernels.norms import reference
from xlstm_jax.kernels.norms.tiling import shape_problem
from xlstm_jax.kernels.shared.log_once import log_once

LOGGER = logging.getLogger(__name__)


def rms_norm(x: Float[Array, "*rows d"], scale: Float[Array, " d"], *, eps: float) -> Float[Array, "*rows d"]:
    """Divide features by their root mean square, and scale them.

    Args:
        x: The features.
        scale: Their scale.
        eps: Added to the mean square.

    Returns:
        The normalised features, in the precision of the inputs.
    """
    *rows, width = x.shape
    if not _is_fused("RMS norm", math.prod(rows), 1, width, x.dtype):
        return reference.rms_norm(x, scale, eps=eps)
    # Imported here, as it needs a newer JAX than plain norms.
    from xlstm_jax.kernels.norms import hopper

    # Traced and lowered once for all layers of a model.
    run: Any = jax.jit(hopper.rms_norm, static_argnums=(2, 3))
    return run(x.reshape(-1, width), scale.astype(jnp.float32), eps, None).reshape(x.shape)


def rms_norm_with_skip(
    x: Float[Array, "*rows d"], scale: Float[Array, " d"], *, eps: float
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows d"]]:
    """Return the unchanged features, and their `rms_norm`; the arguments are those of `rms_norm`.

    If both are used, as on a residual stream, the kernel also adds up the gradients of both.
    """
    *rows, width = x.shape
    if not _is_fused("RMS norm", math.prod(rows), 1, width, x.dtype):
        return x, reference.rms_norm(x, scale, eps=eps)
    from xlstm_jax.kernels.norms import hopper

    run: Any = jax.jit(hopper.rms_norm_with_skip, static_argnums=(2, 3))
    skip, normed = run(x.reshape(-1, width), scale.astype(jnp.float32), eps, None)
    return skip.reshape(x.shape), normed.reshape(x.shape)


def gated_head_norm(
    hidden: Float[Array, "*rows h d"], gate: Float[Array, "*rows c"], scale: Float[Array, " c"], *, eps: float
) -> Float[Array, "*rows c"]:
    """Standardise the features of each head separately, then scale and gate the features of all heads.

    Args:
        hidden: The features of each head.
        gate: Pre-activations of the sigmoid gates of all features.
        scale: The scale of all features.
        eps: Added to the variance.

    Returns:
        `sigmoid(gate) * scale * standardize(hidden)`, with the features of all heads in one axis.
    """
    *rows, num_heads, width = hidden.shape
    if not _is_fused("Head norm", math.prod(rows), num_heads, width, hidden.dtype, gate.dtype):
        return reference.gated_head_norm(hidden, gate, scale, eps=eps)
    from xlstm_jax.kernels.norms import hopper

    heads, scale = (-1, num_heads, width), scale.astype(jnp.float32).reshape(num_heads, width)
    run: Any = jax.jit(hopper.gated_head_norm, static_argnums=(3, 4))
    return run(hidden.reshape(heads), gate.reshape(heads), scale, eps, None).reshape(gate.shape)


def fused_problem(num_rows: int, num_heads: int, width: int, *dtypes: DTypeLike) -> str | None:
    """Return why the kernels for Hopper GPUs are not used for a norm, or `None` if they are.

    Args:
        num_rows: The number of rows.
        num_heads: The number of heads in a row, each with its own statistics.
        width: The number of features in a head.
        *dtypes: The dtypes of all arrays of rows.
    """
    if problem := hopper_unavailable_reason():
        return problem
    if others := sorted({jnp.dtype(dtype).name for dtype in dtypes} - {"bfloat16"}):
        return f"the kernels of norms are for bfloat16, and this is {others[0]}"
    return shape_problem(num_rows, num_heads, width)


def _is_fused(name: str, num_rows: int, num_heads: int, width: int, *dtypes: DTypeLike) -> bool:
    problem = fused_problem(num_rows, num_heads, width, *dtypes)
    log_once(LOGGER, f"{name}: " + ("the kernel for Hopper GPUs." if problem is None else f"plain JAX, as {problem}."))
    return problem is None
