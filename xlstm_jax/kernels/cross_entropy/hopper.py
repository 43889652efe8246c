"""Fused logits on Hopper GPUs: their sums over the vocabulary and their gradients, without storing the logits.

Grid        (split of the vocabulary, rows of tokens). A thread block has `ROWS` tokens and loops over its split of the
            vocabulary. Its two compute warpgroups have half of the tokens each and are not synchronised, so that one
            reduces or stores a tile of logits while the other keeps the tensor cores busy.
Clusters    two thread blocks with different tokens and the same split, which load the tiles of the kernel by multicast.
Shapes      t tokens, d features, v vocabulary; the first axis of `_smem` buffers is the ring stage, and `w` are the two
            compute warpgroups.
Ring        `TILE` features of the tokens, and of the kernel for `COLUMNS` logits.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float, Int

from xlstm_jax.kernels.cross_entropy.plain import FARTHEST, KeptLogits
from xlstm_jax.kernels.cross_entropy.tiling import CLUSTER, COLUMNS, MULTIPLE_OF_TOKENS, num_splits
from xlstm_jax.kernels.mosaic_gpu.device import ROWS, TILE
from xlstm_jax.kernels.mosaic_gpu.launch import launch, specialize_warpgroups
from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, Ref, Slice, pl, plgpu
from xlstm_jax.kernels.mosaic_gpu.ring import Ring
from xlstm_jax.kernels.mosaic_gpu.tiles import ACCUMULATOR, OPERAND, broadcast_rows, load_rows, zeros

LOG2_E = math.log2(math.e)
LOWEST = -1e30
"""A finite lower bound of all logits."""

Carry = tuple[jax.Array, ...]
"""The loop carry of a warpgroup over tiles; each array has one element per token."""
AddTile = Callable[[jax.Array, jax.Array, Index, Carry], Carry]
"""Maps a tile of logits, the vocabulary ids of its columns, the first id, and the carry to the new carry."""


@dataclasses.dataclass(kw_only=True)
class _Refs:
    """The references of the kernels; those that a kernel does not use are `None`."""

    # Inputs in global memory.
    x: Ref  # [t, d]
    kernel: Ref  # [d, v]
    targets: Ref  # [t]
    log_totals: Ref = None
    dlosses: Ref = None
    # Outputs in global memory.
    largest: Ref = None  # [splits, t]
    totals: Ref = None
    target_logits: Ref = None
    distances: Ref = None  # [t, v]
    references: Ref = None  # [v / COLUMNS, t]
    gradients: Ref = None  # [t, v]
    # Shared memory.
    x_smem: Ref  # [stages, w, TILE, TILE]
    kernel_smem: Ref  # [stages, TILE, COLUMNS]
    staging_smem: Ref = None  # [w, TILE, COLUMNS]
    # Barriers.
    full: Ref
    empty: Ref


class _Split(NamedTuple):
    """The work of a thread block."""

    split: Index
    block: Index
    first: Index
    """The first tile of the vocabulary."""
    num_tiles: Index

    def tokens(self, warpgroup: Index) -> Slice:
        """Return the tokens of a warpgroup."""
        return pl.ds(self.block * ROWS + warpgroup * TILE, TILE)


class _Work(NamedTuple):
    """The work of a compute warpgroup."""

    part: _Split
    warpgroup: Index
    tokens: Slice


@dataclasses.dataclass(frozen=True)
class _Kernel(abc.ABC):
    """Base class of the two kernels: their references and static parameters."""

    refs: _Refs
    num_features: int
    vocab_size: int
    num_splits: int
    num_stages: int
    cap: float | None
    interpret: Interpret

    @abc.abstractmethod
    def _compute_tokens(self, work: _Work) -> None:
        """Compute the results for the tokens of a warpgroup."""

    @property
    def ring(self) -> Ring:
        """The ring of tiles."""
        return Ring(self.num_stages, self.refs.full, self.refs.empty)

    @property
    def depth(self) -> int:
        """The number of ring tiles in the matmul of a tile of logits."""
        return self.num_features // TILE

    def __call__(self) -> None:
        """Run a thread block."""
        split, block = lax.axis_index("split"), lax.axis_index("rows")
        if not self.interpret:
            block = block * CLUSTER + lax.axis_index("cluster")
        num_tiles = -(-self.vocab_size // COLUMNS)
        tiles_per_split = -(-num_tiles // self.num_splits)
        first = split * tiles_per_split
        part = _Split(split, block, first, jnp.minimum(tiles_per_split, num_tiles - first))
        specialize_warpgroups(
            2, compute=functools.partial(self._compute, part), load=functools.partial(self._load, part)
        )

    # The compute warpgroups.

    def _compute(self, part: _Split, warpgroup: Index) -> None:
        self._compute_tokens(_Work(part, warpgroup, part.tokens(warpgroup)))

    def _for_each_tile(self, work: _Work, add_tile: AddTile, carry: Carry) -> Carry:
        """Compute the tiles of logits of a warpgroup, call `add_tile` for each, and return the final carry."""

        def tile(n: Index, carry: Carry) -> Carry:
            acc_shape = plgpu.ACC((TILE, COLUMNS), jnp.float32)
            logits = pl.run_scoped(functools.partial(self._multiply, work.warpgroup, n * self.depth), acc_shape)
            if self.cap is not None:
                # The hardware tanh has only eleven bits of precision.
                logits = self.cap - (2.0 * self.cap) / (1.0 + jnp.exp2(logits * (2.0 * LOG2_E / self.cap)))
            start = (work.part.first + n) * COLUMNS
            ids = plgpu.broadcasted_iota(jnp.int32, (TILE, COLUMNS), 1, layout=ACCUMULATOR) + start
            return add_tile(logits, ids, start, carry)

        return lax.fori_loop(0, work.part.num_tiles, tile, carry)

    def _multiply(self, warpgroup: Index, first_tile: Index, acc: Ref) -> jax.Array:
        """Return the matmul of features and kernel for a tile of logits."""
        refs = self.refs

        @pl.loop(0, self.depth)
        def _(n: Index) -> None:
            stage = self.ring.wait(first_tile + n)
            plgpu.wgmma(acc, refs.x_smem.at[stage, warpgroup], refs.kernel_smem.at[stage])
            plgpu.wgmma_wait(1)
            pl.when(n > 0)(lambda: self.ring.release(first_tile + n - 1))

        logits = acc[...]  # waits for the matmul
        self.ring.release(first_tile + self.depth - 1)
        return logits

    def _store_tile(self, tile: jax.Array, target: Ref) -> None:
        """Start the store of a warpgroup's tile, once the previous one has left the staging buffer."""
        staging = self.refs.staging_smem.at[lax.axis_index("warpgroup")]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = tile.astype(staging.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target)

    # The load warpgroup.

    def _load(self, part: _Split) -> None:
        refs = self.refs

        @pl.loop(0, part.num_tiles * self.depth)
        def _(n: Index) -> None:
            features = pl.ds(lax.rem(n, jnp.int32(self.depth)) * TILE, TILE)
            columns = pl.ds((part.first + lax.div(n, jnp.int32(self.depth))) * COLUMNS, COLUMNS)
            own = [(refs.x.at[part.tokens(w), features], refs.x_smem, w) for w in range(2)]
            shared = [(refs.kernel.at[features, columns], refs.kernel_smem)]
            if self.interpret:
                self.ring.fill(n, *own, *shared)
            else:
                self.ring.fill(n, *own, shared=shared)

        self.ring.drain(part.num_tiles * self.depth)


class _SumsKernel(_Kernel):
    """Computes the largest logit, the sum of `exp(logit - largest)`, and the target's logit of each token."""

    def _compute_tokens(self, work: _Work) -> None:
        refs = self.refs
        targets = load_rows(refs.targets.at[work.tokens])
        nothing = zeros(TILE)
        add_tile = functools.partial(self._add_tile, work.tokens, targets)
        results = self._for_each_tile(work, add_tile, (nothing + LOWEST, nothing, nothing))
        for ref, result in zip((refs.largest, refs.totals, refs.target_logits), results, strict=True):
            ref[work.part.split, work.tokens] = result
        if refs.distances is not None:
            plgpu.wait_smem_to_gmem(0)

    def _add_tile(
        self, tokens: Slice, targets: jax.Array, logits: jax.Array, ids: jax.Array, start: Index, carry: Carry
    ) -> Carry:
        refs = self.refs
        largest, total, target_logit = carry
        if self.vocab_size % COLUMNS:
            logits = jnp.where(ids < self.vocab_size, logits, LOWEST)
        new_largest = jnp.maximum(largest, logits.max(axis=1))
        distances = logits - broadcast_rows(new_largest, COLUMNS)
        total = total * jnp.exp2((largest - new_largest) * LOG2_E) + jnp.exp2(distances * LOG2_E).sum(axis=1)
        target_logit = target_logit + jnp.where(ids == broadcast_rows(targets, COLUMNS), logits, 0.0).sum(axis=1)
        if refs.distances is not None:
            target = refs.distances.at[tokens, pl.ds(start, COLUMNS)]
            self._store_tile(jnp.maximum(distances, FARTHEST), target)
            refs.references[lax.div(start, jnp.int32(COLUMNS)), tokens] = new_largest
        return new_largest, total, target_logit


class _LogitGradientsKernel(_Kernel):
    """Computes the gradients of logits before the cap."""

    def _compute_tokens(self, work: _Work) -> None:
        refs = self.refs
        targets, log_totals, dlosses = (
            load_rows(ref.at[work.tokens]) for ref in (refs.targets, refs.log_totals, refs.dlosses)
        )
        shift = log_totals * LOG2_E

        def add_tile(logits: jax.Array, ids: jax.Array, start: Index, carry: Carry) -> Carry:
            gradients = jnp.exp2(logits * LOG2_E - broadcast_rows(shift, COLUMNS))
            gradients = jnp.where(ids == broadcast_rows(targets, COLUMNS), gradients - 1.0, gradients)
            gradients = gradients * broadcast_rows(dlosses, COLUMNS)
            if self.cap is not None:
                gradients = gradients * (1.0 - jnp.square(logits * (1.0 / self.cap)))
            self._store_tile(gradients, refs.gradients.at[work.tokens, pl.ds(start, COLUMNS)])
            return carry

        self._for_each_tile(work, add_tile, ())
        plgpu.wait_smem_to_gmem(0)


def vocabulary_sums(
    x: BFloat16[Array, "t d"],
    kernel: BFloat16[Array, "d v"],
    targets: Int[Array, " t"],
    *,
    cap: float | None,
    keep_logits: bool = False,
    interpret: Interpret = None,
) -> tuple[tuple[Float[Array, " t"], Float[Array, " t"], Float[Array, " t"]], KeptLogits | None]:
    """Compute for each token the largest logit, the sum of `exp(logit - largest)`, and the target's logit.

    Args:
        x: The features of tokens.
        kernel: The projection to the vocabulary.
        targets: The target of each token; out of range if the target is in another shard.
        cap: Logits are squashed into (-cap, cap); `None` for no cap.
        keep_logits: Whether to save the logits, as distances from the running maximum.
        interpret: How to simulate a GPU on a CPU.
    """
    num_tokens, vocab_size = x.shape[0], kernel.shape[1]
    splits = num_splits(num_tokens)
    shape = jax.ShapeDtypeStruct((splits, num_tokens), jnp.float32)
    outputs = {"largest": shape, "totals": shape, "target_logits": shape}
    if keep_logits:
        outputs["distances"] = jax.ShapeDtypeStruct((num_tokens, vocab_size), jnp.float16)
        outputs["references"] = jax.ShapeDtypeStruct((-(-vocab_size // COLUMNS), num_tokens), jnp.float32)
    results = _launch(
        _SumsKernel,
        "vocabulary_sums_and_logits" if keep_logits else "vocabulary_sums",
        {"x": x, "kernel": kernel, "targets": targets},
        outputs,
        splits=splits,
        cap=cap,
        interpret=interpret,
        stored_dtype=jnp.float16 if keep_logits else None,
    )
    largest = jnp.max(results["largest"], axis=0)
    total = jnp.sum(results["totals"] * jnp.exp(results["largest"] - largest), axis=0)
    sums = largest, total, jnp.sum(results["target_logits"], axis=0)
    return sums, KeptLogits(results["distances"], results["references"].T) if keep_logits else None


def logit_gradients(
    x: BFloat16[Array, "t d"],
    kernel: BFloat16[Array, "d v"],
    targets: Int[Array, " t"],
    log_totals: Float[Array, " t"],
    dlosses: Float[Array, " t"],
    *,
    cap: float | None,
    interpret: Interpret = None,
) -> BFloat16[Array, "t v"]:
    """Compute the gradients of logits before the cap.

    Args:
        x: The features of tokens.
        kernel: The projection to the vocabulary.
        targets: The target of each token.
        log_totals: The logarithm of the sum of the exponentials of all logits of each token.
        dlosses: The gradient of each token's loss.
        cap: Logits are squashed into (-cap, cap).
        interpret: How to simulate a GPU on a CPU.
    """
    results = _launch(
        _LogitGradientsKernel,
        "logit_gradients",
        {"x": x, "kernel": kernel, "targets": targets, "log_totals": log_totals, "dlosses": dlosses},
        {"gradients": jax.ShapeDtypeStruct((x.shape[0], kernel.shape[1]), jnp.bfloat16)},
        splits=num_splits(x.shape[0]),
        cap=cap,
        interpret=interpret,
        stored_dtype=jnp.bfloat16,
    )
    return results["gradients"]


def _launch(
    kernel: type[_Kernel],
    name: str,
    inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    splits: int,
    cap: float | None,
    interpret: Interpret,
    stored_dtype: DTypeLike | None,
) -> dict[str, jax.Array]:
    """Run one of the kernels.

    Args:
        kernel: The kernel.
        name: Its name.
        inputs: Its input arrays.
        outputs: The shapes of its results.
        splits: The number of splits of the vocabulary.
        cap: Logits are squashed into (-cap, cap).
        interpret: How to simulate a GPU on a CPU; the simulation has no clusters.
        stored_dtype: The precision of the tiles that it stores; `None` if it stores none.
    """
    (num_tokens, num_features), vocab_size = inputs["x"].shape, inputs["kernel"].shape[1]
    num_stages = 4 if stored_dtype is None else 3
    num_blocks = num_tokens // (ROWS if interpret else MULTIPLE_OF_TOKENS)
    return launch(
        lambda refs: kernel(refs, num_features, vocab_size, splits, num_stages, cap, interpret)(),
        _Refs,
        name=name,
        inputs=inputs,
        outputs=outputs,
        scratch=_scratch(num_stages, stored_dtype, is_cluster=not interpret),
        grid={"split": splits, "rows": num_blocks},
        num_warpgroups=3,
        cluster=None if interpret else {"cluster": CLUSTER},
        interpret=interpret,
    )


def _scratch(num_stages: int, stored_dtype: DTypeLike | None, *, is_cluster: bool) -> dict[str, Any]:
    """Return the shared memory and the barriers of a thread block."""
    empty = {"num_arrivals": 2, "num_barriers": num_stages}
    scratch = {
        "x_smem": plgpu.SMEM((num_stages, 2, TILE, TILE), jnp.bfloat16, transforms=OPERAND),
        "kernel_smem": plgpu.SMEM((num_stages, TILE, COLUMNS), jnp.bfloat16, transforms=OPERAND),
        "full": plgpu.Barrier(num_arrivals=3, num_barriers=num_stages),
        # A load of one block of a cluster is multicast to both, so both must have released the stage.
        "empty": plgpu.ClusterBarrier(collective_axes=("cluster",), **empty) if is_cluster else plgpu.Barrier(**empty),
    }
    if stored_dtype is not None:
        scratch["staging_smem"] = plgpu.SMEM((2, TILE, COLUMNS), stored_dtype, transforms=OPERAND)
    return scratch
