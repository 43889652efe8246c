"""What the sLSTM's kernels share: where the recurrent kernel lies on chip, and how warpgroups exchange values.

Grid        (heads, groups of 8 rows of the batch). A head of `64 w` units is one block of `w` warpgroups; each owns 64
            units, their four gates and their memory, so that a cell is computed without any exchange.
Products    [64 units, 8 rows] = recurrent tiles [64, 64], in registers or shared memory, times what the warpgroups hand
            to each other in shared memory at one barrier a step. Rows are the narrow side, as a recurrence waits for
            the latency of its products and not for their throughput.
Tiles       stay on chip for the whole sequence. In registers they cost nothing to read; those of 192 units do not fit,
            so two thirds of them are in shared memory, which leaves enough registers that none are spilled.
Inputs      come into a ring in shared memory, so that no step waits for memory and none are held in registers. A
            warpgroup asks for those of a later step once all its threads have read the slot. Where tiles fill shared
            memory, the inputs of the next step are asked for in registers.
Order       between two products there is nothing but what the second one waits for. Results are written, and inputs
            read, while tensor cores compute.
Compilers   undo both: they compute all descriptors of tiles before the loop, for which there are no registers, and move
            what could be computed during a product behind it. `Block.unknown_zero` keeps them from it.
Interpreter it has no products with an operand in registers: there all tiles are in shared memory. It cannot see `CELLS`
            in `LINES` either, so that there cells are saved as they are.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu, store
from xlstm_jax.kernels.mosaic_gpu.tiles import OPERAND
from xlstm_jax.kernels.slstm.hopper.limits import ROWS, SAVED

UNITS = 64
"""Units of a warpgroup: the height of a tensor-core product."""
INPUT, FORGET, CELL, OUTPUT = range(4)
TILE_ORDER = (FORGET, OUTPUT, INPUT, CELL)
"""The gates in the order of their recurrent tiles: the first ones are in shared memory."""

WGMMA = plgpu.Layout.WGMMA
ALONG_UNITS = plgpu.Layout.WGMMA_TRANSPOSED
"""As `WGMMA`, but a thread has neighbouring units, not rows: so it reads and writes arrays whose last axis is units."""
OF_ROW = plgpu.Layout.WGMMA.reduce(0)
FLOAT_TILES = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
CELLS = UNITS, ROWS
LINES = 2, UNITS * ROWS // 2
"""What is saved of the cells of a warpgroup, for copies: quick for long axes, and at most 256 numbers of each."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel is laid out on a multiprocessor."""

    head_dim: int
    num_tiles_in_smem: int
    """Of the recurrent tiles of a warpgroup; the others are in registers."""
    ring_depth: int
    """Steps whose inputs are in shared memory, where one that is read makes room for another; 0 if in registers."""
    is_backward: bool

    @property
    def num_warpgroups(self) -> int:
        """Return the number of warpgroups, which is also that of the blocks of 64 along the head."""
        return self.head_dim // UNITS

    def tile(self, gate: int, block: int) -> int:
        """Return where the tile of a gate and a block of 64 inputs of the product is."""
        return TILE_ORDER.index(gate) * self.num_warpgroups + block


def tiling_of(head_dim: int, *, is_backward: bool, interpret: Any = None) -> Tiling:
    """Return the layout for a head of this size."""
    is_large = head_dim == 192
    num_tiles = 4 * head_dim // UNITS if interpret else 8 * is_large
    return Tiling(head_dim, num_tiles, 0 if is_large else 4, is_backward)


@dataclasses.dataclass(frozen=True)
class Options:
    """What a call needs beside the plain recurrence."""

    has_resets: bool
    has_mask: bool
    saves: bool
    interpret: Any = None


def saved_shape(num_warpgroups: int, num_steps: int, options: Options) -> tuple[int, ...]:
    """Return the shape of what is saved; steps are all positions of all heads and groups of rows."""
    return num_steps, SAVED, num_warpgroups, *(CELLS if options.interpret else LINES)


class Block:
    """What both kernels do alike: the tiles of this block, the exchange between its warpgroups, loads and stores."""

    def __init__(self, tiling: Tiling, options: Options, tiles_ref: Any, flags_ref: Any, scratch: tuple):
        self.tiling, self.options = tiling, options
        self.head, self.group = lax.axis_index("head"), lax.axis_index("group")
        self.warpgroup = lax.axis_index("warpgroup") if tiling.num_warpgroups > 1 else 0
        self.units = pl.ds(self.warpgroup * UNITS, UNITS)
        self.rows = pl.ds(self.group * ROWS, ROWS)
        self.flags_ref = flags_ref
        self.tiles_smem, self.exchange, self.arrived, self.handed_over, *ring = scratch
        self.filled, *self.rings = ring or [None]
        self._load_tiles(tiles_ref)

    def _load_tiles(self, tiles_ref):
        in_smem, num_tiles = self.tiling.num_tiles_in_smem, 4 * self.tiling.num_warpgroups
        mine = tiles_ref.at[self.head, self.warpgroup]
        if in_smem:
            arrived = self.arrived.at[self.warpgroup]
            plgpu.copy_gmem_to_smem(mine.at[pl.ds(0, in_smem)], self.tiles_smem.at[self.warpgroup], arrived)
        self.tiles = {
            tile: plgpu.load(mine.at[tile], layout=WGMMA, optimized=False) for tile in range(in_smem, num_tiles)
        }
        if in_smem:
            plgpu.barrier_wait(self.arrived.at[self.warpgroup])

    def unknown_zero(self) -> jax.Array:
        """Return a zero that the compiler has to take for any number; `zero & step` is one that each step changes."""
        return (self.flags_ref[0, 0, 0, 0] > 2).astype(jnp.int32)  # Flags are 0 or 1.

    def multiply(self, accumulator: Any, gate: int, block: int, exchanged: Any, zero: Any) -> None:
        """Start to add the product of a recurrent tile with 64 exchanged values of each row.

        As tiles seem to lie elsewhere in each step, their descriptors are computed where they are used.
        """
        tile = self.tiling.tile(gate, block)
        tile = self.tiles[tile] if tile in self.tiles else self.tiles_smem.at[self.warpgroup + zero, tile]
        plgpu.wgmma(accumulator, tile, exchanged.transpose((1, 0)))

    def publish(self) -> None:
        """Let all warpgroups see what this one has written to the exchange."""
        plgpu.commit_smem()
        if self.tiling.num_warpgroups > 1:
            plgpu.barrier_arrive(self.handed_over)

    def await_others(self) -> None:
        """Wait until all warpgroups have published."""
        if self.tiling.num_warpgroups > 1:
            plgpu.barrier_wait(self.handed_over)

    def ask(self, step: Any, sources: list) -> tuple[jax.Array, ...]:
        """Ask for the inputs of a step, one source for each ring; return those that come into registers."""
        if not self.tiling.ring_depth:
            return _read(sources)
        slot = self._slot(step)
        for source, ring in zip(sources, self.rings, strict=True):
            target = seen_as(source.shape, ring.at[slot, self.warpgroup])
            plgpu.copy_gmem_to_smem(source, target, self._filled(slot))
        return ()

    def receive(self, step: Any, asked: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Wait for the inputs of a step, of which `ask` has returned `asked`, and return all as `[units, rows]`."""
        if self.tiling.ring_depth:
            slot = self._slot(step)
            plgpu.barrier_wait(self._filled(slot))
            asked = _read([ring.at[slot, self.warpgroup] for ring in self.rings])
        return [_by_row(x) for x in asked]

    def drain(self, steps: range) -> None:
        """Wait for inputs that nobody reads, if they go into the ring: it must outlive their copies."""
        for step in steps:
            plgpu.barrier_wait(self._filled(self._slot(step)))

    def _slot(self, step):
        return step % self.tiling.ring_depth if isinstance(step, int) else lax.rem(step, self.tiling.ring_depth)

    def _filled(self, slot):
        return self.filled.at[slot * self.tiling.num_warpgroups + self.warpgroup]

    def source(self, ref: Any, *index: Any) -> Any:
        """Return `[rows, units]` of `ref[rows, *index, head, units]`."""
        return ref.at[self.rows, *index, self.head, self.units]

    def saved(self, ref: Any, position: Any) -> Any:
        """Return what is saved of a position, `[SAVED, warpgroup, *LINES]`."""
        num_heads, num_groups = lax.axis_size("head"), lax.axis_size("group")
        return ref.at[(position * num_heads + self.head) * num_groups + self.group]

    def load(self, ref: Any, *index: Any) -> jax.Array:
        """Read `[units, rows]` of `ref[rows, *index, head, units]`."""
        return _by_row(*_read([self.source(ref, *index)]))

    def store(self, ref: Any, *index: Any, value: jax.Array) -> None:
        """Write `[units, rows]` to `ref[rows, *index, head, units]`."""
        mine = self.source(ref, *index).transpose((1, 0))
        store(mine, plgpu.layout_cast(value.astype(ref.dtype), ALONG_UNITS))

    def flags(self, position: Any) -> tuple[jax.Array, ...]:
        """Load what is said of each row at a position: whether it begins, and whether it counts."""
        used = (self.options.has_resets, self.options.has_mask)
        refs = [self.flags_ref.at[position, self.group, i] for i, is_used in enumerate(used) if is_used]
        return tuple(plgpu.load(ref, layout=OF_ROW, optimized=False) for ref in refs)

    def select(self, flags: tuple[jax.Array, ...]) -> tuple[Callable, Callable]:
        """Return `unless_begins(x)` and `if_counts(x, other)`."""
        spread = [lax.broadcast_in_dim(flag, (UNITS, ROWS), [1]) > 0.5 for flag in flags]
        begins = spread[0] if self.options.has_resets else None
        counts = spread[-1] if self.options.has_mask else None

        def unless_begins(x):
            return x if begins is None else jnp.where(begins, 0.0, x)

        def if_counts(x, other):
            return x if counts is None else jnp.where(counts, x, other)

        return unless_begins, if_counts


def seen_as(shape: tuple[int, ...], ref: Any) -> Any:
    """Return the same numbers in another shape."""
    return ref if ref.shape == shape else ref.reshape(shape)


def _read(refs: list) -> tuple[jax.Array, ...]:
    """Read references `[rows, units]`, and all that is saved of references `[SAVED, ...]`."""
    values = []
    for ref in refs:
        if ref.shape == (ROWS, UNITS):
            values.append(plgpu.load(ref.transpose((1, 0)), layout=ALONG_UNITS, optimized=False))
        else:
            saved = [seen_as(CELLS, ref.at[i]) for i in range(SAVED)]
            values.extend(plgpu.load(cells, layout=WGMMA, optimized=False) for cells in saved)
    return tuple(values)


def _by_row(x: jax.Array) -> jax.Array:
    """Turn what was read into the float32 numbers and the layout of an accumulator, `[units, rows]`."""
    return plgpu.layout_cast(x, WGMMA).astype(jnp.float32)


def start(products: list[Callable[[], None]], tasks: list[Callable[[], Any]]) -> list:
    """Start products, and do tasks: one after each product from the fifth on, the others at the end; return results.

    Warpgroups share tensor cores: while one does something else, they work for others.
    """
    waiting, results = iter(tasks), []
    for i, product in enumerate(products):
        product()
        results += [task() for task in itertools.islice(waiting, int(i >= 4))]
    return results + [task() for task in waiting]


def reciprocal(x: jax.Array) -> jax.Array:
    """Compute `1/x` of positive numbers, infinity included, without the slow path of a rounded division."""
    return lax.square(lax.rsqrt(x))


def split_lead(lead: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the stabilised input and forget gates from the difference of their logarithms: the larger is 1."""
    less = jnp.exp(-jnp.abs(lead))
    return jnp.where(lead > 0, 1.0, less), jnp.where(lead > 0, less, 1.0)


def launch(
    body: Callable[..., None],
    tiling: Tiling,
    options: Options,
    outputs: list,
    inputs: list[jax.ShapeDtypeStruct],
    arguments: tuple,
) -> list[jax.Array]:
    """Run a kernel for all heads and groups of rows; `inputs` says what a ring holds of a warpgroup and a step."""
    num_heads, num_groups = arguments[0].shape[0], outputs[0].shape[0] // ROWS
    w, in_smem = tiling.num_warpgroups, tiling.num_tiles_in_smem
    num_exchanged = 4 * w if tiling.is_backward else w

    def ring(tile: jax.ShapeDtypeStruct) -> Any:
        transforms = OPERAND if tile.dtype == jnp.bfloat16 else FLOAT_TILES
        is_tiled = tile.shape == (ROWS, UNITS)
        shape = tiling.ring_depth, w, *tile.shape
        return plgpu.SMEM(shape, tile.dtype, transforms=transforms if is_tiled else ())

    rings = []
    if tiling.ring_depth:
        filled = plgpu.Barrier(num_barriers=tiling.ring_depth * w, num_arrivals=len(inputs))
        rings = [filled, *map(ring, inputs)]
    return plgpu.kernel(
        body,
        out_type=outputs,
        grid=(num_heads, num_groups),
        grid_names=("head", "group"),
        num_threads=w,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((w, max(in_smem, 1), UNITS, UNITS), jnp.bfloat16, transforms=OPERAND),
            plgpu.SMEM((2, num_exchanged, ROWS, UNITS), jnp.bfloat16, transforms=OPERAND),
            plgpu.Barrier(num_barriers=w),
            plgpu.Barrier(num_arrivals=w),
            *rings,
        ],
        # What a warpgroup writes to shared memory is read by tensor cores alone, after `publish`.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=options.interpret,
    )(*arguments)
