"""The sLSTM on Hopper GPUs: one launch forward and one backward, with the recurrent kernel on chip for all steps.

Numerics    matmuls of bfloat16 in float32; everything else in float32. Reciprocals are squares of `rsqrt`, to 2e-7.
Contract    the arguments and results of `slstm_recompute`; heads of 64, 128 or 192 units, a recurrent kernel in
            bfloat16, gates in float32 or bfloat16.
Memory      saved for the backward pass: the hidden states, and six float32 arrays of their shape, but not the gates.
Backward    the kernel computes the gradients of pre-activations; one matmul gives that of the recurrent kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.shared.remat_names import keep
from xlstm_jax.kernels.slstm.hopper.backward import BackwardKernel, BackwardRefs
from xlstm_jax.kernels.slstm.hopper.block import (
    CELLS,
    TILE_ORDER,
    UNITS,
    Options,
    launch_block,
    saved_shape,
    tiling_of,
)
from xlstm_jax.kernels.slstm.hopper.forward import ForwardKernel, ForwardRefs
from xlstm_jax.kernels.slstm.hopper.limits import ROWS, SAVED
from xlstm_jax.kernels.slstm.state import SLSTMState


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def slstm_mosaic(
    gates: Float[Array, "b s 4 h d"],
    recurrent: Float[Array, "h d 4 d"],
    state: SLSTMState,
    resets: Bool[Array, "b s"] | None,
    mask: Bool[Array, "b s"] | None,
    interpret: Any = None,
) -> tuple[Float[Array, "b s h d"], SLSTMState]:
    """Compute all hidden states, in the dtype of the gates, and the last state.

    `interpret` takes `InterpretGPUParams` of Pallas, which simulate the GPU on a CPU.
    """
    hidden, last, _ = _run_forward(gates, recurrent, state, resets, mask, interpret, saves=False)
    return hidden, last


def _run_forward(gates, recurrent, state: SLSTMState, resets, mask, interpret, saves: bool):
    b, s, _, h, d = gates.shape
    tiling = tiling_of(d, is_backward=False, interpret=interpret)
    options = Options(resets is not None, mask is not None, saves, interpret)
    gates, states, flags = _whole_groups(gates, jnp.stack(state, axis=1), _flags(resets, mask, b))
    rows = len(gates)
    outputs = {
        "hidden": jax.ShapeDtypeStruct((rows, s, h, d), gates.dtype),
        "last": jax.ShapeDtypeStruct((rows, 4, h, d), jnp.float32),
    }
    if saves:
        shape = saved_shape(tiling.num_warpgroups, s * h * rows // ROWS, options)
        outputs["saved"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    tiles = _tiles(recurrent, is_transposed=True)
    results = launch_block(
        lambda refs: ForwardKernel(tiling, options, s, refs).run(),
        ForwardRefs,
        tiling,
        options,
        inputs={"tiles": tiles, "gates": gates, "state": states, "flags": _by_position(flags)},
        outputs=outputs,
        prefetched=[jax.ShapeDtypeStruct((ROWS, UNITS), gates.dtype)] * 4,
    )
    hidden, last = results["hidden"][:b], results["last"][:b]
    return hidden, SLSTMState(*jnp.moveaxis(last, 1, 0)), results.get("saved")


def _forward(gates, recurrent, state, resets, mask, interpret):
    hidden, last, saved = _run_forward(gates, recurrent, state, resets, mask, interpret, saves=True)
    hidden, saved = keep((hidden, saved))
    return (hidden, last), (recurrent, state.hidden, resets, mask, hidden, saved)


def _backward(interpret, residuals, cotangents):
    recurrent, first_hidden, resets, mask, hidden, saved = residuals
    dhidden, dlast = cotangents
    b, s, h, d = hidden.shape
    tiling = tiling_of(d, is_backward=True, interpret=interpret)
    options = Options(resets is not None, mask is not None, False, interpret)
    dhidden, dlast, flags = _whole_groups(dhidden, jnp.stack(dlast[:3], axis=1), _flags(resets, mask, b))
    rows = len(dhidden)
    tiles = _tiles(recurrent, is_transposed=False)
    results = launch_block(
        lambda refs: BackwardKernel(tiling, options, s, refs).run(),
        BackwardRefs,
        tiling,
        options,
        inputs={"tiles": tiles, "saved": saved, "dhidden": dhidden, "dlast": dlast, "flags": _by_position(flags)},
        outputs={
            "draws": jax.ShapeDtypeStruct((rows, s, 4, h, d), hidden.dtype),
            "dfirst": jax.ShapeDtypeStruct((rows, 3, h, d), jnp.float32),
        },
        prefetched=[
            jax.ShapeDtypeStruct((SAVED, *CELLS), jnp.float32),
            jax.ShapeDtypeStruct((ROWS, UNITS), dhidden.dtype),
        ],
    )
    draws, (dfirst_hidden, dcell, dnormalizer) = results["draws"][:b], jnp.moveaxis(results["dfirst"][:b], 1, 0)
    hidden_before = jnp.concatenate([first_hidden[:, None].astype(hidden.dtype), hidden[:, :-1]], axis=1)
    if resets is not None:
        hidden_before = jnp.where(resets[..., None, None], 0.0, hidden_before)
    drecurrent = jnp.einsum(
        "bshd,bsghe->hdge",
        hidden_before.astype(recurrent.dtype),
        draws.astype(recurrent.dtype),
        preferred_element_type=jnp.float32,
    )
    dstate = SLSTMState(dfirst_hidden, dcell, dnormalizer, jnp.zeros_like(dcell))
    return draws, drecurrent.astype(recurrent.dtype), dstate, None, None


def _tiles(recurrent: jax.Array, is_transposed: bool) -> jax.Array:
    """Split the kernel `[head, from, gate, to]` into `[head, warpgroup, tile, 64, 64]`, in `TILE_ORDER` of the gates.

    A warpgroup has 64 units of `from`, or 64 units of `to` if transposed, and a tile has 64 units of the other side.
    """
    h, d, _, _ = recurrent.shape
    w = d // UNITS
    split = recurrent[:, :, jnp.array(TILE_ORDER)].reshape(h, w, UNITS, 4, w, UNITS)
    axes = (0, 4, 3, 1, 5, 2) if is_transposed else (0, 1, 3, 4, 2, 5)
    return split.transpose(axes).reshape(h, w, 4 * w, UNITS, UNITS)


def _flags(resets: jax.Array | None, mask: jax.Array | None, num_rows: int) -> jax.Array:
    """Return the flags `[row, s, (begins, counts)]`; without resets and mask, a single position that is never read."""
    length = next((x.shape[1] for x in (resets, mask) if x is not None), 1)
    both = [jnp.zeros((num_rows, length), bool) if x is None else x for x in (resets, mask)]
    return jnp.stack(both, axis=2).astype(jnp.float32)


def _by_position(flags: jax.Array) -> jax.Array:
    """Reshape `[row, s, flag]` to `[s, group, flag, row]`."""
    return flags.reshape(-1, ROWS, *flags.shape[1:]).transpose(2, 0, 3, 1)


def _whole_groups(*arrays: jax.Array) -> list[jax.Array]:
    """Zero-pad the last group of rows."""
    missing = -len(arrays[0]) % ROWS
    return [jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))) if missing else x for x in arrays]


slstm_mosaic.defvjp(_forward, _backward)
