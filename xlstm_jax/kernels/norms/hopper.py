"""Norms on a Hopper GPU: each number is read once and written once, in the forward and in the backward pass.

The kernels are limited by memory bandwidth. A thread block loops over tiles of whole rows of one head, and prefetches
the next tile into registers while it computes with the current one; several thread blocks share a multiprocessor. The
backward pass recomputes the statistics from its tile, so only the inputs are saved for it:

    n = (x - mean) r,     r = 1/sqrt(variance + eps)                   without the mean for `rms_norm`
    y = n scale sigmoid(gate)
    dx     = r (dn - mean(dn) - n mean(dn n)),                         dn = dy scale sigmoid(gate)
    dgate  = dn n (1 - sigmoid(gate))
    dscale = sum over rows of dy n sigmoid(gate)

Each block accumulates its part of `dscale` in registers, and XLA sums the few hundred parts. Computations are in
float32, and results are rounded once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, pl, plgpu, store
from xlstm_jax.kernels.norms.tiling import LANES, WARPS, Tiling, choose_tiling, num_blocks

LOG2_E = 1.4426950408889634
RESIDENT = {
    "rms_norm": {16: 8, 24: 6, 32: 4},
    "rms_norm_gradients": {16: 4, 24: 3, 32: 2},
    "rms_norm_with_skip_gradients": {16: 3, 32: 2},
    "gated_head_norm": {16: 6, 24: 4, 32: 3},
    "gated_head_norm_gradients": {16: 3, 32: 2},
}
"""Resident blocks per multiprocessor, limited by the registers of the compiled kernel, by elements per thread."""
COLUMNS = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (8,), (1,))), warp_dims=(-3,), lane_dims=(plgpu.Replicated(4), -2), vector_dim=-1
)
"""Layout with 32 columns at a time, each in one lane of one or four warps: sums over rows need no exchange."""


class _Rows:
    """Operations on the rows of a tile, which is distributed over the threads by a tiling."""

    def __init__(self, tiling: Tiling):
        self.shape = tiling.rows, tiling.width
        self.layout = _layout(tiling)

    def load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_column(self, ref: Any) -> jax.Array:
        """Load one number per column, repeated over the rows."""
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
        """Return normalised rows and the inverse RMS that they were scaled by."""
        mean_square = jnp.sum(x * x, axis=1) * (1 / self.shape[1])
        r = lax.broadcast_in_dim(lax.rsqrt(mean_square + eps), self.shape, [0])
        return x * r, r


def _layout(tiling: Tiling) -> Any:
    """Return the layout of a tile over the threads, without dimensions of size 1, which Pallas does not allow."""
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
    """Compute the sigmoid without the slow path of an exactly rounded division."""
    return lax.square(lax.rsqrt(1 + lax.exp2(-LOG2_E * x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(
    x: Float[Array, "rows d"], scale: Float[Array, " d"], eps: float, interpret: Interpret = None
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

    (y,) = _launch("rms_norm", compute, [x[:, None]], scale[None], num_outputs=1, has_sums=False, interpret=interpret)
    return y[:, 0]


def _rms_norm_forward(x, scale, eps, interpret):
    return rms_norm(x, scale, eps, interpret), (x, scale)


def _rms_norm_backward(eps, interpret, residuals, dy):
    x, scale = residuals
    return _rms_norm_gradients(x, scale, dy, None, eps, interpret)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm_with_skip(
    x: Float[Array, "rows d"], scale: Float[Array, " d"], eps: float, interpret: Interpret = None
) -> tuple[Float[Array, "rows d"], Float[Array, "rows d"]]:
    """Return the unchanged features, and their `rms_norm`: one kernel adds up the gradients of both.

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
    dx, dscale = _launch(name, compute, arrays, scale[None], num_outputs=1, has_sums=True, interpret=interpret)
    return dx[:, 0], dscale[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def gated_head_norm(
    hidden: Float[Array, "rows h d"],
    gate: Float[Array, "rows h d"],
    scale: Float[Array, "h d"],
    eps: float,
    interpret: Interpret = None,
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
    (y,) = _launch("gated_head_norm", compute, arrays, scale, num_outputs=1, has_sums=False, interpret=interpret)
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
    return tuple(_launch(name, compute, [*arrays, dy], scale, num_outputs=2, has_sums=True, interpret=interpret))


gated_head_norm.defvjp(_gated_head_norm_forward, _gated_head_norm_backward)


Compute = Callable[..., tuple[list[jax.Array], jax.Array | None]]
"""Computes tiles of the outputs, and the terms to sum over rows, from `_Rows`, the scale and tiles of the inputs."""


@dataclasses.dataclass(kw_only=True)
class _Refs:
    """The references of a kernel."""

    inputs: Sequence[Ref]  # [rows, h, d]
    scale: Ref  # [h, d]
    outputs: Sequence[Ref]  # [rows, h, d]
    sums: Ref = None  # [blocks, h, d]
    staging_smem: Ref = None  # [rows of a tile, d]


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel that loops over tiles of the rows of a head."""

    refs: _Refs
    compute: Compute
    tiling: Tiling
    num_tiles: int
    num_blocks: int

    @property
    def rows(self) -> _Rows:
        """The operations on the rows of a tile."""
        return _Rows(self.tiling)

    def __call__(self) -> None:
        """Process the tiles of a thread block."""
        block, head = lax.axis_index("block"), lax.axis_index("head")
        scale = self.rows.load_column(self.refs.scale.at[head])
        carry = self._load(block, head), () if self.refs.sums is None else self.rows.zeros()
        num_steps = (self.num_tiles - block + self.num_blocks - 1) // self.num_blocks
        _, sums = lax.fori_loop(0, num_steps, functools.partial(self._step, block, head, scale), carry)
        if self.refs.sums is not None:
            self._store_sums(block, head, sums)

    def _load(self, tile: Index, head: Index) -> tuple[jax.Array, ...]:
        rows = pl.ds(tile * self.tiling.rows, self.tiling.rows)
        return tuple(self.rows.load(ref.at[rows, head]) for ref in self.refs.inputs)

    def _step(
        self, block: Index, head: Index, scale: jax.Array, n: Index, carry: tuple[tuple[jax.Array, ...], Any]
    ) -> tuple[tuple[jax.Array, ...], Any]:
        """Prefetch the next tile, compute with the loaded one, and store the results."""
        loaded, sums = carry
        tile = block + n * self.num_blocks
        # After its last tile, a block loads the same tile again from the cache, and does not use it.
        has_next = tile + self.num_blocks < self.num_tiles
        prefetched = self._load(jnp.where(has_next, tile + self.num_blocks, tile), head)
        results, added = self.compute(self.rows, scale, *(x.astype(jnp.float32) for x in loaded))
        for ref, x in zip(self.refs.outputs, results, strict=True):
            store(ref.at[pl.ds(tile * self.tiling.rows, self.tiling.rows), head], x.astype(ref.dtype))
        return prefetched, sums if self.refs.sums is None else sums + added

    def _store_sums(self, block: Index, head: Index, sums: jax.Array) -> None:
        """Store the sums over the rows of a block."""
        refs = self.refs
        if self.tiling.rows == 1:
            store(refs.sums.at[pl.ds(block, 1), head], sums)
        else:
            store(refs.staging_smem, sums)
            plgpu.commit_smem()  # which waits for all threads
            by_column = plgpu.load(refs.staging_smem, layout=COLUMNS, optimized=False)
            store(refs.sums.at[block, head], jnp.sum(by_column, axis=0))


def _launch(
    name: str,
    compute: Compute,
    arrays: Sequence[Float[Array, "rows h d"]],
    scale: Float[Array, "h d"],
    *,
    num_outputs: int,
    has_sums: bool,
    interpret: Interpret,
) -> list[jax.Array]:
    """Run a kernel over all rows.

    Args:
        name: The name of the kernel.
        compute: The computation on a tile.
        arrays: The inputs.
        scale: The scale, one element per column.
        num_outputs: The number of outputs, which have the shape of the inputs.
        has_sums: Whether there are sums over rows.
        interpret: How to simulate a GPU on a CPU.

    Returns:
        The outputs, followed by the sums over rows if there are any.
    """
    num_rows, num_heads, width = arrays[0].shape
    tiling = choose_tiling(width)
    assert tiling is not None
    num_tiles, stride = num_rows // tiling.rows, num_blocks(RESIDENT[name], tiling, num_rows, num_heads)

    def kernel(*refs: Ref) -> None:
        inputs, scale_ref, rest = refs[: len(arrays)], refs[len(arrays)], refs[len(arrays) + 1 :]
        sums, staging = rest[num_outputs:] if has_sums else (None, None)
        named = _Refs(inputs=inputs, scale=scale_ref, outputs=rest[:num_outputs], sums=sums, staging_smem=staging)
        _Kernel(named, compute, tiling, num_tiles, stride)()

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(arrays[0].shape, arrays[0].dtype)] * num_outputs
        + [jax.ShapeDtypeStruct((stride, num_heads, width), jnp.float32)] * has_sums,
        # The last axis is the fastest, so concurrent blocks read neighbouring heads.
        grid=(stride, num_heads),
        grid_names=("block", "head"),
        scratch_types=[plgpu.SMEM((tiling.rows, tiling.width), jnp.float32)] * has_sums,
        # Threads only exchange the sums, after a barrier.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*arrays, scale)
    # In a scan that stacks results, XLA would otherwise run the kernel twice: for the stack, and for other uses.
    results = lax.optimization_barrier(results)
    return [*results[:num_outputs], *(jnp.sum(parts, axis=0) for parts in results[num_outputs:])]
