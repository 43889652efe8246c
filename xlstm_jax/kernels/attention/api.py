"""Public functions for attention: the backends of JAX, and packed documents without a mask of all position pairs."""

import logging
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from xlstm_jax.kernels.attention import packed
from xlstm_jax.kernels.attention.documents import document_bounds, number_documents
from xlstm_jax.kernels.attention.hopper.tiling import TILINGS, tiling_problem
from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
from xlstm_jax.kernels.mosaic_gpu.device import ROWS
from xlstm_jax.kernels.shared.log_once import log_once

LOGGER = logging.getLogger(__name__)

Backend = Literal["auto", "xla", "cudnn", "mosaic"]
Form = Literal["mosaic", "packed", "mask"]
"""How documents are separated: kernels for Hopper GPUs, cuDNN's packed layout, or a mask of all position pairs."""
LARGEST_HEAD_DIM = 128


def attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b n hk d"],
    v: Float[Array, "b n hk d"],
    mask: Bool[Array, "b 1 s n"] | None = None,
    *,
    causal: bool,
    scale: float | None,
    backend: Literal["xla", "cudnn"],
) -> Float[Array, "b s hq d"]:
    """Compute attention for any length, with an optional mask that is True where a query attends to a key.

    cuDNN needs the mask as a bias: an array of all position pairs in the precision of the inputs.
    """
    length = q.shape[1]
    if backend == "cudnn" and length % 2 and k.shape[1] == length:
        # With a bias, cuDNN's gradients need an even length. No other position attends to the padding.
        if mask is None and not causal:
            mask = jnp.ones((q.shape[0], 1, length, length), bool)
        if mask is not None:
            mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 1), (0, 1))).at[..., -1, -1].set(True)
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, scale=scale, implementation=backend)
    return out[:, :length]


def document_attention(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    segment_ids: Int[Array, "b s"],
    *,
    causal: bool,
    scale: float | None,
    backend: Backend,
) -> Float[Array, "b s hq d"]:
    """Compute attention within documents; a document is a run of equal segment ids in a row.

    `mosaic`, and `cudnn` on Hopper GPUs and later, compute only the position pairs within documents, and materialise no
    array of all pairs. Otherwise, a mask of all pairs is built. `auto` is for GPUs, and selects the fastest of these.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    form, description = choose_form(q, k, causal=causal, scale=scale, backend=backend)
    if backend != "xla":
        log_once(LOGGER, f"Attention within documents: {description}.")
    if form == "mosaic":
        return run_mosaic(q, k, v, segment_ids, scale)
    documents = number_documents(segment_ids)
    if form == "packed":
        return packed.packed_attention(q, k, v, documents, causal, scale, packed.choose_slots(*q.shape))
    mask = (documents[:, :, None] == documents[:, None, :])[:, None]
    return attention(q, k, v, mask, causal=causal, scale=scale, backend="xla" if backend == "xla" else "cudnn")


def choose_form(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    *,
    causal: bool,
    scale: float,
    backend: Backend,
) -> tuple[Form, str]:
    """Return how documents are separated, and the description to log.

    Raises:
        ValueError: If the backend is `mosaic` and cannot run; the message has the reason.
    """
    if backend == "xla":
        return "mask", "a mask of all pairs of positions, as XLA computes attention"
    not_mosaic = f"{backend} is the backend"
    if backend != "cudnn":
        not_mosaic = mosaic_problem(q.dtype, q.shape[-1], scale=scale, causal=causal)
        if not_mosaic is None:
            return "mosaic", "the kernels for Hopper GPUs"
        if backend == "mosaic":
            raise ValueError(f"The attention backend 'mosaic' cannot run here: {not_mosaic}. Choose 'auto'.")
    not_packed = packed_problem(q, k)
    if not_packed is None:
        return "packed", f"cuDNN's packed layout, as {not_mosaic}"
    return "mask", f"a mask of all pairs of positions, as {not_packed}"


def run_mosaic(
    q: Float[Array, "b s hq d"],
    k: Float[Array, "b s hk d"],
    v: Float[Array, "b s hk d"],
    segment_ids: Int[Array, "b s"],
    scale: float,
    interpret: Any = None,
) -> Float[Array, "b s hq d"]:
    """Run the kernels for Hopper GPUs. Rows are padded to whole tiles; the padding is a separate document.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        segment_ids: Each run of equal ids in a row is a document.
        scale: The factor of the scores `q . k`.
        interpret: How to simulate a GPU on a CPU.
    """
    # Imported here, as it needs a newer JAX than the other forms.
    from xlstm_jax.kernels.attention.hopper.attention import mosaic_attention

    length, tiling = q.shape[1], TILINGS[q.shape[-1]]
    starts, ends = document_bounds(segment_ids)
    if missing := -length % ROWS:
        q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
        rest = ((0, 0), (0, missing))
        starts = jnp.pad(starts, rest, constant_values=length)
        ends = jnp.pad(ends, rest, constant_values=length + missing)
    # Traced and lowered once for all layers of a model.
    run: Any = jax.jit(mosaic_attention, static_argnums=(5, 6, 7))
    return run(q, k, v, starts, ends, tiling, scale, interpret)[:, :length]


def mosaic_problem(dtype: DTypeLike, head_dim: int, *, scale: float = 1.0, causal: bool = True) -> str | None:
    """Return why the kernels for Hopper GPUs cannot compute attention here, or `None` if they can."""
    if problem := hopper_unavailable_reason():
        return problem
    if not causal:
        return "the kernels are for causal attention"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernels are for bfloat16, not {jnp.dtype(dtype)}"
    return tiling_problem(head_dim, scale)


def packed_problem(q: Float[Array, "b s hq d"], k: Float[Array, "b s hk d"]) -> str | None:
    """Return why cuDNN's packed layout cannot be used here, or `None` if it can."""
    capability = getattr(jax.devices()[0], "compute_capability", None)
    if jax.default_backend() != "gpu" or capability is None or float(capability) < packed.NEEDED_CAPABILITY:
        return f"cuDNN's packed layout needs a Hopper GPU or a later one, not {jax.devices()[0].device_kind}"
    if q.shape[-1] > LARGEST_HEAD_DIM or q.shape[-1] % 8:
        return f"cuDNN's packed layout needs heads of 8, 16, ... {LARGEST_HEAD_DIM} features, not {q.shape[-1]}"
    if max(q.size, k.size) > packed.LARGEST_OFFSET:
        return f"cuDNN's packed layout needs 32-bit offsets, and there are {max(q.size, k.size)} numbers"
    if packed.choose_slots(*q.shape) < 2:
        return f"cuDNN's packed layout would need too much memory for {q.shape[0]} rows of {q.shape[1]} positions"
    return None
