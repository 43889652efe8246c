"""Norms on a Hopper GPU: each number is read once and written once, forwards and backwards.

Memory is all that counts. A block walks over tiles of whole rows of one head, and has the next tile on its way into
registers while it computes with one; several blocks share a multiprocessor. Statistics come from the tile itself, so
nothing but the inputs is kept for the backward pass:

    n = (x - mean) r,     r = 1/sqrt(variance + eps)                   without the mean for `rms_norm`
    y = n scale sigmoid(gate)
    dx     = r (dn - mean(dn) - n mean(dn n)),                         dn = dy scale sigmoid(gate)
    dgate  = dn n (1 - sigmoid(gate))
    dscale = sum over rows of dy n sigmoid(gate)

Each block adds up its part of `dscale`, in registers; the few hundred parts are summed by XLA. Numbers are float32
inside, and are rounded once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu, store
from xlstm_jax.kernels.norms.tiling import LANES, WARPS, Tiling, choose_tiling, num_blocks

LOG2_E = 1.4426950408889634
RESIDENT = {
    "rms_norm": {16: 8, 24: 6, 32: 4},
    "rms_norm_gradients": {16: 4, 24: 3, 32: 2},
    "rms_norm_with_skip_gradients": {16: 3, 32: 2},
    "gated_head_norm": {16: 6, 24: 4, 32: 3},
    "gated_head_norm_gradients": {16: 3, 32: 2},
}
"""Blocks for which the registers of a multiprocessor are enough, as compiled, by the most numbers in a thread."""
COLUMNS = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (8,), (1,))), warp_dims=(-3,), lane_dims=(plgpu.Replicated(4), -2), vector_dim=-1
)
"""32 columns at a time, each in one place of one warp, or four: rows are summed without any exchange."""


class _Rows:
    """What is done with the rows of a tile; their numbers are among the threads as a tiling says."""

    def __init__(self, tiling: Tiling):
        self.shape = tiling.rows, tiling.width
        self.layout = _layout(tiling)

    def load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_column(self, ref: Any) -> jax.Array:
        """Load a number for each column, repeated over the rows."""
        row = plgpu.load(ref, layout=self.layout.reduce(0), optimized=False)
        return lax.broadcast_in_dim(row, self.shape, [1])

    def zeros(self) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), self.layout)

    def mean(self, x: jax.Array) -> jax.Array:
        """Return the mean of each row, repeated over the columns."""
        return lax.broadcast_in_dim(jnp.sum(x, axis=1) * (1 / self.shape[1]), self.shape, [0])

    def center(self, x: jax.Array) -> jax.Array:
        return x - self.mean(x)

    def normalize(self, x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
        """Return rows divided by their root mean square, and by what they were multiplied."""
        mean_square = jnp.sum(x * x, axis=1) * (1 / self.shape[1])
        r = lax.broadcast_in_dim(lax.rsqrt(mean_square + eps), self.shape, [0])
        return x * r, r


def _layout(tiling: Tiling) -> Any:
    """Return where the numbers of a tile are among the threads; Pallas wants dimensions of 1 to be left out."""
    part, vector = tiling.lanes * tiling.vector, (tiling.vector,)
    if tiling.lanes < LANES:  # A warp has several rows: [warps, 1, rows, lanes, vector].
        rows = LANES // tiling.lanes
        tiles, warp_dims, lane_dims = ((WARPS * rows, part), (rows, part), vector), (-5,), (-3, -2)
    elif tiling.warps == 1:  # [warps, lanes, vector]
        tiles, warp_dims, lane_dims = ((WARPS, part), vector), (-3,), (-2,)
    else:  # [rows, warps of a row, lanes, vector]
        rows = WARPS // tiling.warps
        tiles, lane_dims = ((rows, tiling.warps * part), (part,), vector), (-2,)
        warp_dims = (-4, -3) if rows > 1 else (-3,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1)


def _sigmoid(x: jax.Array) -> jax.Array:
    """Compute the sigmoid without the slow path of a rounded division."""
    return lax.square(lax.rsqrt(1 + lax.exp2(-LOG2_E * x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(
    x: Float[Array, "rows d"], scale: Float[Array, " d"], eps: float, interpret: Any = None
) -> Float[Array, "rows d"]:
    """Compute `reference.rms_norm` of bfloat16.

    Args:
        x: The features, bfloat16.
        scale: Their scale, float32.
        eps: Added to the mean square.
        interpret: How to simulate a GPU on a CPU.
    """

    def compute(rows: _Rows, scale: jax.Array, x: jax.Array) -> tuple[list, None]:
        normed, _ = rows.normalize(x, eps)
        return [normed * scale], None

    (y,) = _walk("rms_norm", compute, [x[:, None]], scale[None], num_outputs=1, has_sums=False, interpret=interpret)
    return y[:, 0]


def _rms_norm_forward(x, scale, eps, interpret):
    return rms_norm(x, scale, eps, interpret), (x, scale)


def _rms_norm_backward(eps, interpret, residuals, dy):
    x, scale = residuals
    return _rms_norm_gradients(x, scale, dy, None, eps, interpret)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm_with_skip(
    x: Float[Array, "rows d"], scale: Float[Array, " d"], eps: float, interpret: Any = None
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Return the features as they are, and `rms_norm` of them: one kernel adds up the gradients of both.

    Args:
        x: The features, bfloat16.
        scale: Their scale, float32.
        eps: Added to the mean square.
        interpret: How to simulate a GPU on a CPU.
    """
    return x, rms_norm(x, scale, eps, interpret)


def _rms_norm_with_skip_forward(x, scale, eps, interpret):
    return rms_norm_with_skip(x, scale, eps, interpret), (x, scale)


def _rms_norm_with_skip_backward(eps, interpret, residuals, gradients):
    (x, scale), (dskip, dy) = residuals, gradients
    return _rms_norm_gradients(x, scale, dy, dskip, eps, interpret)


rms_norm_with_skip.defvjp(_rms_norm_with_skip_forward, _rms_norm_with_skip_backward)


def _rms_norm_gradients(x, scale, dy, dskip, eps, interpret):
    def compute(rows: _Rows, scale: jax.Array, x: jax.Array, dy: jax.Array, *dskip: jax.Array) -> tuple[list, Any]:
        normed, r = rows.normalize(x, eps)
        dnormed = dy * scale
        dx = r * (dnormed - normed * rows.mean(dnormed * normed))
        return [sum(dskip, dx)], dy * normed

    arrays = [array[:, None] for array in (x, dy, dskip) if array is not None]
    name = "rms_norm_gradients" if dskip is None else "rms_norm_with_skip_gradients"
    dx, dscale = _walk(name, compute, arrays, scale[None], num_outputs=1, has_sums=True, interpret=interpret)
    return dx[:, 0], dscale[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def gated_head_norm(
    hidden: Float[Array, "rows h d"],
    gate: Float[Array, "rows h d"],
    scale: Float[Array, "h d"],
    eps: float,
    interpret: Any = None,
) -> Float[Array, "rows h d"]:
    """Compute `reference.gated_head_norm` of bfloat16.

    Args:
        hidden: The features of each head, bfloat16.
        gate: Pre-activations of their gates, bfloat16.
        scale: Their scale, float32.
        eps: Added to the variance.
        interpret: How to simulate a GPU on a CPU.
    """

    def compute(rows: _Rows, scale: jax.Array, hidden: jax.Array, gate: jax.Array) -> tuple[list, None]:
        normed, _ = rows.normalize(rows.center(hidden), eps)
        return [normed * scale * _sigmoid(gate)], None

    arrays = [hidden, gate]
    (y,) = _walk("gated_head_norm", compute, arrays, scale, num_outputs=1, has_sums=False, interpret=interpret)
    return y


def _gated_head_norm_forward(hidden, gate, scale, eps, interpret):
    return gated_head_norm(hidden, gate, scale, eps, interpret), (hidden, gate, scale)


def _gated_head_norm_backward(eps, interpret, residuals, dy):
    *arrays, scale = residuals

    def compute(rows: _Rows, scale: jax.Array, hidden: jax.Array, gate: jax.Array, dy: jax.Array):
        normed, r = rows.normalize(rows.center(hidden), eps)
        opened = _sigmoid(gate)
        let_through = dy * opened
        dnormed = let_through * scale
        overlap = dnormed * normed
        dhidden = r * (rows.center(dnormed) - normed * rows.mean(overlap))
        return [dhidden, overlap * (1 - opened)], let_through * normed

    name = "gated_head_norm_gradients"
    return tuple(_walk(name, compute, [*arrays, dy], scale, num_outputs=2, has_sums=True, interpret=interpret))


gated_head_norm.defvjp(_gated_head_norm_forward, _gated_head_norm_backward)


def _walk(
    name: str,
    compute: Callable[..., tuple[list, jax.Array | None]],
    arrays: Sequence[Float[Array, "rows h d"]],
    scale: Float[Array, "h d"],
    *,
    num_outputs: int,
    has_sums: bool,
    interpret: Any,
) -> list[jax.Array]:
    """Run over all rows of some arrays.

    Args:
        name: The name of the kernel.
        compute: Computes outputs from a tile of each array and the scale, and, if asked for, what is summed over rows.
        arrays: What is read.
        scale: A number for each column.
        num_outputs: How many arrays of the same shape are computed.
        has_sums: Whether something is summed over rows.
        interpret: How to simulate a GPU on a CPU.

    Returns:
        The outputs, and last the sums over rows, if there are any.
    """
    num_rows, num_heads, width = arrays[0].shape
    tiling = choose_tiling(width)
    assert tiling is not None
    rows = _Rows(tiling)
    num_tiles, stride = num_rows // tiling.rows, num_blocks(RESIDENT[name], tiling, num_rows, num_heads)

    def body(*refs: Any) -> None:
        inputs, scale_ref = refs[: len(arrays)], refs[len(arrays)]
        outputs = refs[len(arrays) + 1 :][:num_outputs]
        block, head = lax.axis_index("block"), lax.axis_index("head")
        column = rows.load_column(scale_ref.at[head])

        def load(tile: Any) -> tuple[jax.Array, ...]:
            mine = pl.ds(tile * tiling.rows, tiling.rows)
            return tuple(rows.load(ref.at[mine, head]) for ref in inputs)

        def step(n: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            loaded, sums = carried
            tile = block + n * stride
            # Behind its last tile, a block loads that again: from the cache, and for nobody.
            ahead = load(jnp.where(tile + stride < num_tiles, tile + stride, tile))
            computed, added = compute(rows, column, *(x.astype(jnp.float32) for x in loaded))
            for ref, x in zip(outputs, computed, strict=True):
                store(ref.at[pl.ds(tile * tiling.rows, tiling.rows), head], x.astype(ref.dtype))
            return ahead, sums + added if has_sums else sums

        start = load(block), rows.zeros() if has_sums else ()
        steps = (num_tiles - block + stride - 1) // stride
        _, sums = lax.fori_loop(0, steps, step, start)
        if has_sums:
            sums_ref, staging = refs[-2:]
            if tiling.rows == 1:
                store(sums_ref.at[pl.ds(block, 1), head], sums)
            else:
                store(staging, sums)
                plgpu.commit_smem()  # which waits for all threads
                by_column = plgpu.load(staging, layout=COLUMNS, optimized=False)
                store(sums_ref.at[block, head], jnp.sum(by_column, axis=0))

    body.__name__ = name
    results = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * num_outputs
        + [jax.ShapeDtypeStruct((stride, num_heads, width), jnp.float32)] * has_sums,
        # The last axis is the fastest: blocks that run at the same time read neighbouring heads.
        grid=(stride, num_heads),
        grid_names=("block", "head"),
        scratch_types=[plgpu.SMEM(rows.shape, jnp.float32)] * has_sums,
        # Only the sums are handed from thread to thread, and behind a barrier.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*arrays, scale)
    # In a scan that stacks results, XLA would run the kernel once for the stack and once more for other uses.
    results = lax.optimization_barrier(results)
    return [*results[:num_outputs], *(jnp.sum(parts, axis=0) for parts in results[num_outputs:])]
