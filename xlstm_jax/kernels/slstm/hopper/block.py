"""The common parts of the sLSTM's kernels: the recurrent kernel on chip, and the exchange between warpgroups.

Grid        (heads, groups of 8 rows of the batch). A head of `64 w` units is one block of `w` warpgroups; each has 64
            units, their four gates and their memory, so that cells are computed without any exchange.
Matmuls     [64 units, 8 rows] = recurrent tiles [64, 64], in registers or shared memory, times the values that the
            warpgroups exchange in shared memory at one barrier per step. Rows are the narrow side, as a recurrence is
            limited by the latency of its matmuls and not by their throughput.
Tiles       are on chip for the whole sequence. In registers they need no loads; those of 192 units do not fit, so two
            thirds of them are in shared memory, which leaves enough registers to avoid spills.
Inputs      are prefetched into a ring in shared memory, so that no step waits for memory and no registers are used. A
            warpgroup prefetches the inputs of a later step once all its threads have read the stage. If tiles fill
            shared memory, the inputs of the next step are prefetched into registers.
Order       between two matmuls, only the inputs of the second one are computed. Results are stored, and inputs are
            loaded, while the tensor cores are busy.
Compilers   would undo both: they hoist all tile descriptors out of the loop, which exceeds the registers, and move
            computations that could overlap with a matmul after it. `Block.opaque_zero` prevents this.
Simulation  does not support matmuls with an operand in registers, so all tiles are in shared memory there. It cannot
            reshape `LINES` to `CELLS` either, so cells are saved unreshaped there.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.launch import launch
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, pl, plgpu, store
from xlstm_jax.kernels.mosaic_gpu.tiles import OPERAND
from xlstm_jax.kernels.slstm.hopper.limits import ROWS, SAVED

UNITS = 64
"""Units per warpgroup: the height of a matmul on tensor cores."""
INPUT, FORGET, CELL, OUTPUT = range(4)
TILE_ORDER = (FORGET, OUTPUT, INPUT, CELL)
"""The gates in the order of their recurrent tiles; the first tiles are in shared memory."""

WGMMA = plgpu.Layout.WGMMA
ALONG_UNITS = plgpu.Layout.WGMMA_TRANSPOSED
"""Like `WGMMA`, but a thread has adjacent units, not rows, for access to arrays whose last axis is units."""
OF_ROW = plgpu.Layout.WGMMA.reduce(0)
FLOAT_TILES = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
CELLS = UNITS, ROWS
LINES = 2, UNITS * ROWS // 2
"""The shape in which the cells of a warpgroup are saved: copies are fast for long axes, and limited to 256 per axis."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The layout of a kernel on a multiprocessor."""

    head_dim: int
    num_tiles_in_smem: int
    """The number of recurrent tiles per warpgroup in shared memory; the others are in registers."""
    ring_depth: int
    """Stages of the ring of inputs in shared memory; 0 if inputs are in registers."""
    is_backward: bool

    @property
    def num_warpgroups(self) -> int:
        """Return the number of warpgroups, which is also the number of blocks of 64 units in a head."""
        return self.head_dim // UNITS

    def tile(self, gate: int, block: int) -> int:
        """Return the index of the tile of a gate and a block of 64 inputs of the matmul."""
        return TILE_ORDER.index(gate) * self.num_warpgroups + block


def tiling_of(head_dim: int, *, is_backward: bool, interpret: Interpret = None) -> Tiling:
    """Return the layout for a head of this size."""
    is_large = head_dim == 192
    num_tiles = 4 * head_dim // UNITS if interpret else 8 * is_large
    return Tiling(head_dim, num_tiles, 0 if is_large else 4, is_backward)


@dataclasses.dataclass(frozen=True)
class Options:
    """The variants of the recurrence that a call needs."""

    has_resets: bool
    has_mask: bool
    saves: bool
    interpret: Interpret = None


def saved_shape(num_warpgroups: int, num_steps: int, options: Options) -> tuple[int, ...]:
    """Return the shape of the saved array; steps are all positions of all heads and groups of rows."""
    return num_steps, SAVED, num_warpgroups, *(CELLS if options.interpret else LINES)


@dataclasses.dataclass(kw_only=True)
class BlockRefs:
    """The references that both kernels have."""

    # Inputs in global memory.
    tiles: Ref  # [head, warpgroup, tile, 64, 64]
    flags: Ref  # [position, group, (resets, mask), ROWS]
    # Shared memory.
    tiles_smem: Ref  # [warpgroup, tile, 64, 64]
    exchange_smem: Ref  # [2, warpgroups, or 4 gates times these, ROWS, 64]
    # Barriers.
    tiles_full: Ref
    exchange_full: Ref
    # The ring of inputs, if they are in shared memory: one buffer [stages, warpgroup, ...] for each.
    inputs_full: Ref = None
    inputs_smem: tuple[Ref, ...] = ()


class Block:
    """Base class of both kernels: the tiles of this block, the exchange between its warpgroups, loads and stores."""

    def __init__(self, tiling: Tiling, options: Options, refs: BlockRefs):
        self.tiling, self.options = tiling, options
        self.head, self.group = lax.axis_index("head"), lax.axis_index("group")
        self.warpgroup = lax.axis_index("warpgroup") if tiling.num_warpgroups > 1 else 0
        self.units = pl.ds(self.warpgroup * UNITS, UNITS)
        self.rows = pl.ds(self.group * ROWS, ROWS)
        self.block_refs = refs
        self._load_tiles()

    def _load_tiles(self) -> None:
        refs = self.block_refs
        in_smem, num_tiles = self.tiling.num_tiles_in_smem, 4 * self.tiling.num_warpgroups
        mine = refs.tiles.at[self.head, self.warpgroup]
        if in_smem:
            full = refs.tiles_full.at[self.warpgroup]
            plgpu.copy_gmem_to_smem(mine.at[pl.ds(0, in_smem)], refs.tiles_smem.at[self.warpgroup], full)
        self.tiles = {
            tile: plgpu.load(mine.at[tile], layout=WGMMA, optimized=False) for tile in range(in_smem, num_tiles)
        }
        if in_smem:
            plgpu.barrier_wait(refs.tiles_full.at[self.warpgroup])

    def opaque_zero(self) -> jax.Array:
        """Return a zero that the compiler cannot fold; `zero & step` is a zero that depends on the step."""
        return (self.block_refs.flags[0, 0, 0, 0] > 2).astype(jnp.int32)  # Flags are 0 or 1.

    def multiply(self, acc: Ref, gate: int, block: int, exchanged: Ref, zero: jax.Array) -> None:
        """Start to add the matmul of a recurrent tile and 64 exchanged values of each row.

        As the address of a tile appears to depend on the step, its descriptor is computed at its use.
        """
        tile = self.tiling.tile(gate, block)
        tile = self.tiles[tile] if tile in self.tiles else self.block_refs.tiles_smem.at[self.warpgroup + zero, tile]
        plgpu.wgmma(acc, tile, exchanged.transpose((1, 0)))

    def publish(self) -> None:
        """Make this warpgroup's writes to the exchange visible to all warpgroups."""
        plgpu.commit_smem()
        if self.tiling.num_warpgroups > 1:
            plgpu.barrier_arrive(self.block_refs.exchange_full)

    def await_others(self) -> None:
        """Wait until all warpgroups have published."""
        if self.tiling.num_warpgroups > 1:
            plgpu.barrier_wait(self.block_refs.exchange_full)

    def prefetch(self, step: Index, sources: list[Ref]) -> tuple[jax.Array, ...]:
        """Start loading the inputs of a step, one source for each ring; return those that are loaded into registers."""
        if not self.tiling.ring_depth:
            return _read(sources)
        slot = self._slot(step)
        for source, ring in zip(sources, self.block_refs.inputs_smem, strict=True):
            target = seen_as(source.shape, ring.at[slot, self.warpgroup])
            plgpu.copy_gmem_to_smem(source, target, self._full(slot))
        return ()

    def wait_for_inputs(self, step: Index, prefetched: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Wait for the inputs of a step, of which `prefetch` returned `prefetched`; return all as `[units, rows]`."""
        if self.tiling.ring_depth:
            slot = self._slot(step)
            plgpu.barrier_wait(self._full(slot))
            prefetched = _read([ring.at[slot, self.warpgroup] for ring in self.block_refs.inputs_smem])
        return [_as_accumulator(x) for x in prefetched]

    def drain(self, steps: range) -> None:
        """Wait for prefetches that no step reads, which must complete before the block exits."""
        for step in steps:
            plgpu.barrier_wait(self._full(self._slot(step)))

    def _slot(self, step: Index) -> Index:
        return step % self.tiling.ring_depth if isinstance(step, int) else lax.rem(step, self.tiling.ring_depth)

    def _full(self, slot: Index) -> Ref:
        return self.block_refs.inputs_full.at[slot * self.tiling.num_warpgroups + self.warpgroup]

    def source(self, ref: Ref, *index: Index) -> Ref:
        """Return `[rows, units]` of `ref[rows, *index, head, units]`."""
        return ref.at[self.rows, *index, self.head, self.units]

    def saved(self, ref: Ref, position: Index) -> Ref:
        """Return the saved arrays of a position, `[SAVED, warpgroup, *LINES]`."""
        num_heads, num_groups = lax.axis_size("head"), lax.axis_size("group")
        return ref.at[(position * num_heads + self.head) * num_groups + self.group]

    def load(self, ref: Ref, *index: Index) -> jax.Array:
        """Read `[units, rows]` of `ref[rows, *index, head, units]`."""
        return _as_accumulator(*_read([self.source(ref, *index)]))

    def store(self, ref: Ref, *index: Index, value: jax.Array) -> None:
        """Write `[units, rows]` to `ref[rows, *index, head, units]`."""
        mine = self.source(ref, *index).transpose((1, 0))
        store(mine, plgpu.layout_cast(value.astype(ref.dtype), ALONG_UNITS))

    def flags(self, position: Index) -> tuple[jax.Array, ...]:
        """Load the flags of each row at a position: whether a document starts, and whether the position is valid."""
        used = (self.options.has_resets, self.options.has_mask)
        refs = [self.block_refs.flags.at[position, self.group, i] for i, is_used in enumerate(used) if is_used]
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


def seen_as(shape: tuple[int, ...], ref: Ref) -> Ref:
    """Return a view of a reference in another shape."""
    return ref if ref.shape == shape else ref.reshape(shape)


def _read(refs: list[Ref]) -> tuple[jax.Array, ...]:
    """Read references `[rows, units]`, and all saved arrays of references `[SAVED, ...]`."""
    values = []
    for ref in refs:
        if ref.shape == (ROWS, UNITS):
            values.append(plgpu.load(ref.transpose((1, 0)), layout=ALONG_UNITS, optimized=False))
        else:
            saved = [seen_as(CELLS, ref.at[i]) for i in range(SAVED)]
            values.extend(plgpu.load(cells, layout=WGMMA, optimized=False) for cells in saved)
    return tuple(values)


def _as_accumulator(x: jax.Array) -> jax.Array:
    """Convert an array to float32 and the layout of an accumulator, `[units, rows]`."""
    return plgpu.layout_cast(x, WGMMA).astype(jnp.float32)


def start(matmuls: list[Callable[[], None]], tasks: list[Callable[[], Any]]) -> list:
    """Start matmuls, and run one task after each matmul from the fifth on, the others at the end; return results.

    Warpgroups share tensor cores: while one warpgroup runs a task, the others use them.
    """
    waiting, results = iter(tasks), []
    for i, matmul in enumerate(matmuls):
        matmul()
        results += [task() for task in itertools.islice(waiting, int(i >= 4))]
    return results + [task() for task in waiting]


def reciprocal(x: jax.Array) -> jax.Array:
    """Compute `1/x` of positive numbers, infinity included, without the slow path of an exactly rounded division."""
    return lax.square(lax.rsqrt(x))


def split_lead(lead: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the stabilised input and forget gates from the difference of their logarithms; the larger one is 1."""
    less = jnp.exp(-jnp.abs(lead))
    return jnp.where(lead > 0, 1.0, less), jnp.where(lead > 0, less, 1.0)


def launch_block(
    kernel: Callable[[Any], None],
    refs_type: type[BlockRefs],
    tiling: Tiling,
    options: Options,
    *,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    prefetched: list[jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """Run a kernel for all heads and groups of rows; `prefetched` are the inputs of a warpgroup in a step."""
    num_heads, num_groups = inputs["tiles"].shape[0], next(iter(outputs.values())).shape[0] // ROWS
    w, in_smem = tiling.num_warpgroups, tiling.num_tiles_in_smem
    num_exchanged = 4 * w if tiling.is_backward else w

    def ring(tile: jax.ShapeDtypeStruct) -> Any:
        transforms = OPERAND if tile.dtype == jnp.bfloat16 else FLOAT_TILES
        is_tiled = tile.shape == (ROWS, UNITS)
        shape = tiling.ring_depth, w, *tile.shape
        return plgpu.SMEM(shape, tile.dtype, transforms=transforms if is_tiled else ())

    # Only tensor cores read the writes of warpgroups to shared memory, after `publish`.
    scratch = {
        "tiles_smem": plgpu.SMEM((w, max(in_smem, 1), UNITS, UNITS), jnp.bfloat16, transforms=OPERAND),
        "exchange_smem": plgpu.SMEM((2, num_exchanged, ROWS, UNITS), jnp.bfloat16, transforms=OPERAND),
        "tiles_full": plgpu.Barrier(num_barriers=w),
        "exchange_full": plgpu.Barrier(num_arrivals=w),
    }
    if tiling.ring_depth:
        num_barriers = tiling.ring_depth * w
        scratch["inputs_full"] = plgpu.Barrier(num_barriers=num_barriers, num_arrivals=len(prefetched))
        scratch["inputs_smem"] = tuple(map(ring, prefetched))
    return launch(
        kernel,
        refs_type,
        name="body",
        inputs=inputs,
        outputs=outputs,
        scratch=scratch,
        grid={"head": num_heads, "group": num_groups},
        num_warpgroups=w,
        interpret=options.interpret,
    )
