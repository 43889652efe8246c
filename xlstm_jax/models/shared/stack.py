"""A stack of blocks: scanned or unrolled, rematerialised, sharded, with the same parameters either way.

A block is a module `block(x, state, context) -> (x, state)`. Block `i` draws its parameters from the key folded with
`i`. Blocks that repeat a pattern are scanned over its repetitions: their parameters are stored under `block`, stacked
along a first axis (for a pattern of several kinds, one entry for each place in it). Otherwise block `i` is `block_<i>`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_policies

from xlstm_jax.common_types import PyTree
from xlstm_jax.distributed.data_parallel import gather_params, shard_params
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.kernels.shared.remat_names import KEPT, OPERAND, STREAM
from xlstm_jax.utils.partitioned import is_partitioned, partition_names, unboxed, with_names

RematPolicy = Literal["none", "norms", "dots", "full", "offload"]
"""What the backward pass recomputes: nothing; norms; everything but matmuls, the residual stream and what kernels save;
everything; or everything but matmuls, whose results are offloaded to the host."""


def _products_and(*names: str) -> Callable:
    return checkpoint_policies.save_from_both_policies(
        checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(*names)
    )


REMAT_POLICIES: dict[str, Callable] = {
    "full": checkpoint_policies.nothing_saveable,
    "dots": _products_and(KEPT, STREAM),
    "norms": _products_and(KEPT, STREAM, OPERAND),
    "offload": checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}


@dataclasses.dataclass(frozen=True)
class Context:
    """The properties of a batch that all blocks depend on."""

    document_borders: jax.Array | None = None
    """The positions at which documents start; the states of recurrent layers are reset there."""
    positions: jax.Array | None = None
    """The position of each token in its document."""
    train: bool = False
    """Whether dropout is on."""
    keeps_state: bool = False
    """Whether the states after the last token are returned."""
    last_only: bool = False
    """Whether only the outputs of the last position are needed."""
    block_index: jax.Array | int = 0
    """The index of the block in the stack; initialisers may depend on it."""

    def requested(self, x: jax.Array) -> jax.Array:
        """Return the positions of `[batch, length, ...]` whose outputs are needed.

        A block calls it after its last operation that mixes positions.
        """
        return x[:, -1:] if self.last_only else x


class BlockStack(nn.Module):
    """Blocks of the given kinds, one after the other.

    Attributes:
        kinds: The kind of each block.
        block_fn: Creates a block of a kind.
        parallel: Whether the parameters of blocks are sharded over the FSDP axis (`"Block"` in `fsdp_modules`), and
            whether blocks are recomputed in full (`"Block"` in `remat`).
        scan: Whether to scan over repetitions.
        remat: What the backward pass recomputes.
    """

    kinds: Sequence[str]
    block_fn: Callable[[str], nn.Module]
    parallel: ParallelConfig
    scan: bool = True
    remat: RematPolicy = "none"

    @nn.compact
    def __call__(self, x: jax.Array, states: PyTree, context: Context) -> tuple[jax.Array, PyTree]:
        """Run all blocks.

        Args:
            x: The inputs of the first block.
            states: The states of all blocks as returned by the last call or by `init_states`; `None` is an empty state.
            context: The properties of the batch.

        Returns:
            The outputs of the last block, and the states of all blocks if the context keeps them. Scanned blocks all
            run the same program, so they return all positions.
        """
        init_key = self.make_rng("params") if self.is_initializing() else None
        dropout_key = self.make_rng("dropout") if context.train and self.has_rng("dropout") else None
        for_next_block = dataclasses.replace(context, last_only=False)
        if is_scanned(self.kinds, self.scan):
            return self._scan(x, states, for_next_block, init_key, dropout_key)
        new_states = []
        pattern = period(self.kinds)
        drawn = self._init_pattern(x, context, init_key) if self.is_initializing() else []
        for index, kind in enumerate(self.kinds):
            repetition, place = divmod(index, len(pattern))
            params = self._params(
                f"block_{index}",
                lambda place=place, repetition=repetition: jax.tree.map(lambda leaf: leaf[repetition], drawn[place]),
            )
            own_context = for_next_block if index < len(self.kinds) - 1 else context
            x, state, sown = self._run(kind)(params, x, states[index], own_context, index, dropout_key)
            self._keep_intermediates(f"block_{index}", sown)
            new_states.append(state)
        return x, tuple(new_states)

    def _scan(self, x: jax.Array, states: PyTree, context: Context, init_key: Any, dropout_key: Any):
        pattern = period(self.kinds)
        repetitions = jnp.arange(len(self.kinds) // len(pattern))

        def init_all():
            stacked = self._init_pattern(x, context, init_key)
            return _unlist(jax.tree.map(_add_leading_axis, stacked, is_leaf=is_partitioned))

        params = _enlist(self._params("block", init_all), len(pattern))

        def body(x, repetition):
            index, params, states = repetition
            new_states, all_sown = [], []
            for place, kind in enumerate(pattern):
                own = jax.tree.map(_drop_leading_name, params[place], is_leaf=is_partitioned)
                block_index = index * len(pattern) + place
                x, state, sown = self._run(kind)(own, x, states[place], context, block_index, dropout_key)
                new_states.append(state)
                all_sown.append(sown)
            return x, (tuple(new_states), all_sown)

        x, (states, sown) = jax.lax.scan(body, x, (repetitions, params, states))
        self._keep_intermediates("block", _unlist(sown))
        return x, states

    def _params(self, name: str, init: Callable[[], PyTree]) -> PyTree:
        """Create or read the parameters under a name."""
        if self.is_initializing():
            return self.param(name, lambda _: init(), unbox=False)
        return self.get_variable("params", name)

    def _init_pattern(self, x: jax.Array, context: Context, key: Any) -> list[PyTree]:
        """Draw the parameters of all repetitions of each place of the pattern, in a loop that compiles once."""
        pattern = period(self.kinds)

        def of_repetition(repetition):
            return [
                self._init_block(kind, x, context, key, repetition * len(pattern) + place)
                for place, kind in enumerate(pattern)
            ]

        return jax.lax.map(of_repetition, jnp.arange(len(self.kinds) // len(pattern)))

    def _init_block(self, kind: str, x: jax.Array, context: Context, key: Any, index: jax.Array | int) -> PyTree:
        context = dataclasses.replace(context, train=False, block_index=index)
        params = self.block_fn(kind).init(jax.random.fold_in(key, index), x, None, context)["params"]
        if "Block" in self.parallel.fsdp_modules:
            params = shard_params(params, self.parallel.fsdp_axis_name, self.parallel.fsdp_min_weight_size)
        return params

    def _run(self, kind: str) -> Callable:
        """Return a function that runs a block: gather its parameters, apply it, rematerialise it as `remat` says."""
        parallel = self.parallel
        mutable = ["intermediates"] if self.is_mutable_collection("intermediates") else False
        block = self.block_fn(kind)

        def run(params, x, state, context, index, dropout_key):
            params = gather_params(
                params, parallel.fsdp_axis_name, parallel.fsdp_gather_dtype, parallel.fsdp_grad_scatter_dtype
            )
            rngs = {} if dropout_key is None else {"dropout": jax.random.fold_in(dropout_key, index)}
            result = block.apply({"params": params}, x, state, context, rngs=rngs, mutable=mutable)
            (x, state), sown = result if mutable else (result, {})
            return x, state, sown.get("intermediates", {})

        remat = "full" if self.remat == "none" and "Block" in parallel.remat else self.remat
        if remat == "none":
            return run
        policy = REMAT_POLICIES[remat]

        def rematerialised(params, x, state, context, index, dropout_key):
            arrays = (params, x, state, context.document_borders, context.positions, index, dropout_key)

            def from_arrays(params, x, state, borders, positions, index, dropout_key):
                inner = dataclasses.replace(context, document_borders=borders, positions=positions)
                return run(params, x, state, inner, index, dropout_key)

            return jax.checkpoint(from_arrays, policy=policy, prevent_cse=not is_scanned(self.kinds, self.scan))(
                *arrays
            )

        return rematerialised

    def _keep_intermediates(self, name: str, sown: PyTree) -> None:
        if self.is_mutable_collection("intermediates") and jax.tree.leaves(sown):
            self.put_variable("intermediates", name, sown)


def init_states(kinds: Sequence[str], scan: bool, init_state: Callable[[str], PyTree]) -> PyTree:
    """Return the states of all blocks before the first token, in the layout of `BlockStack`."""
    if not is_scanned(kinds, scan):
        return tuple(init_state(kind) for kind in kinds)
    pattern = period(kinds)
    num_repetitions = len(kinds) // len(pattern)
    stack = functools.partial(jax.tree.map, lambda x: jnp.broadcast_to(x, (num_repetitions, *x.shape)))
    return tuple(stack(init_state(kind)) for kind in pattern)


def is_scanned(kinds: Sequence[str], scan: bool) -> bool:
    """Return whether blocks are scanned: `scan` is on and a pattern repeats."""
    return scan and len(period(kinds)) < len(kinds)


def period(kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest pattern that the kinds repeat."""
    for length in range(1, len(kinds) + 1):
        if len(kinds) % length == 0 and list(kinds) == list(kinds[:length]) * (len(kinds) // length):
            return tuple(kinds[:length])
    return ()


def _unlist(items: list) -> PyTree:
    """Return the items of a pattern's places as a tree: the item itself if there is one place, else a dictionary."""
    return items[0] if len(items) == 1 else {str(place): item for place, item in enumerate(items)}


def _enlist(tree: PyTree, num_places: int) -> list[PyTree]:
    return [tree] if num_places == 1 else [tree[str(place)] for place in range(num_places)]


def _add_leading_axis(leaf: Any) -> Any:
    """Name the leading axis of a stacked leaf, which is replicated."""
    value = unboxed(leaf)
    return with_names(value, (None, *partition_names(leaf)[: value.ndim - 1])) if is_partitioned(leaf) else leaf


def _drop_leading_name(leaf: Any) -> Any:
    return with_names(leaf.value, tuple(leaf.names)[1:]) if is_partitioned(leaf) else leaf
