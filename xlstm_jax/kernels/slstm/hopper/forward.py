"""The forward kernel of the sLSTM: a loop over the positions, run by each warpgroup of a thread block.

With `lead` the logarithm of the input gate minus that of the forget gate and the previous stabiliser, the stabilised
gates are `min(1, exp(lead))` and `min(1, exp(-lead))`, so the backward pass needs only `lead`, not the stabiliser.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Ref, pl, plgpu
from xlstm_jax.kernels.slstm.hopper.block import (
    CELL,
    CELLS,
    FORGET,
    INPUT,
    OUTPUT,
    UNITS,
    Block,
    BlockRefs,
    Options,
    Tiling,
    reciprocal,
    seen_as,
    split_lead,
    start,
)
from xlstm_jax.kernels.slstm.hopper.limits import ROWS

GATES_OF_HALVES = (INPUT, FORGET), (CELL, OUTPUT)


@dataclasses.dataclass(kw_only=True)
class ForwardRefs(BlockRefs):
    """The references of the kernel."""

    gates: Ref  # [row, position, gate, head, unit]
    state: Ref  # [row, 4, head, unit]
    hidden: Ref  # [row, position, head, unit]
    last: Ref  # [row, 4, head, unit]
    saved: Ref = None  # of `saved_shape`


class _State(NamedTuple):
    """The memory of the cells without the hidden state, `[units, rows]` each."""

    cell: jax.Array
    normalizer: jax.Array
    stabilizer: jax.Array


class _Results(NamedTuple):
    """The results of a position to store, `[units, rows]` each."""

    hidden: jax.Array
    cell_input: jax.Array
    raw_output: jax.Array


class _Carry(NamedTuple):
    """The loop carry of a warpgroup over positions."""

    results: _Results
    state: _State
    flags: tuple[jax.Array, ...]
    prefetched: tuple[jax.Array, ...]
    zero: jax.Array


class ForwardKernel(Block):
    """Reads gates, first state and flags, and stores hidden states and last state.

    It optionally stores the residuals of the backward pass.
    """

    def __init__(self, tiling: Tiling, options: Options, length: int, refs: ForwardRefs):
        super().__init__(tiling, options, refs)
        self.length, self.refs = length, refs

    def run(self) -> None:
        """Loop over all positions."""
        depth, refs, length = self.tiling.ring_depth, self.refs, self.length
        prefetched = self._prefetch(0)
        for i in range(1, depth - 1):
            self._prefetch(i)
        hidden, *state = (self.load(refs.state, i) for i in range(4))
        self._hand_over(0, hidden)
        results = _Results(hidden, hidden, hidden)
        carry = _Carry(results, _State(*state), self.flags(0), prefetched, self.opaque_zero())
        last = lax.fori_loop(np.int32(0), np.int32(length), self._step, carry)
        for store in self._stores(length - 1, last.results):
            store()
        for i, value in enumerate((last.results.hidden, *last.state)):
            self.store(refs.last, i, value=value)
        self.await_others()
        self.drain(range(length, length + depth - 1))

    def _prefetch(self, step: Index) -> tuple[jax.Array, ...]:
        position = jnp.minimum(step, self.length - 1)
        return self.prefetch(step, [self.source(self.refs.gates, position, gate) for gate in range(4)])

    def _hand_over(self, position: Index, hidden: jax.Array) -> None:
        """Publish the hidden state before a position."""
        target = self.refs.exchange_smem.at[lax.rem(position, 2), self.warpgroup].transpose((1, 0))
        target[...] = hidden.astype(jnp.bfloat16)
        self.publish()

    def _save(self, position: Index, index: int, value: jax.Array) -> None:
        if self.refs.saved is not None:
            mine = self.saved(self.refs.saved, position).at[index, self.warpgroup]
            seen_as(CELLS, mine)[...] = value

    def _stores(self, position: Index, results: _Results) -> list[Callable[[], None]]:
        """Return the stores of a position's results."""
        return [
            lambda: self.store(self.refs.hidden, position, value=results.hidden),
            lambda: self._save(position, 2, results.cell_input),
            lambda: self._save(position, 3, results.raw_output),
        ]

    def _step(self, position: Index, carry: _Carry) -> _Carry:
        depth = self.tiling.ring_depth
        unless_begins, if_counts = self.select(carry.flags)
        next_flags = self.flags(jnp.minimum(position + 1, self.length - 1))
        hidden, *state = map(unless_begins, (carry.results.hidden, *carry.state))
        state = _State(*state)
        into_ring = [lambda: self._prefetch(position + depth - 1)] if depth else []
        next_prefetched = () if depth else self._prefetch(position + 1)
        # At the first position there are no results yet; these stores are overwritten at the second position.
        meanwhile = [
            *self._stores(jnp.maximum(position - 1, 0), carry.results),
            lambda: self._save(position, 4, state.cell),
            lambda: self._save(position, 5, if_counts(state.normalizer, 1.0)),
            *into_ring,
        ]
        self.await_others()
        update = functools.partial(self._update_stabilizer_and_normalizer, position, state, if_counts)
        stabilizer, normalizer, kept, input_gate, raw_cell, raw_output = self._preactivations(
            position, carry, meanwhile, unless_begins, update
        )
        cell_input = 2 * reciprocal(1 + jnp.exp(-2 * raw_cell)) - 1
        cell = kept + input_gate * cell_input
        scale = reciprocal((1 + jnp.exp(-raw_output)) * normalizer)
        next_hidden = if_counts(scale * cell, hidden)
        self._hand_over(position + 1, next_hidden)
        news = zip((cell, normalizer, stabilizer), state, strict=True)
        return _Carry(
            _Results(next_hidden, cell_input, if_counts(raw_output, -jnp.inf)),
            _State(*(if_counts(new, old) for new, old in news)),
            next_flags,
            next_prefetched,
            carry.zero & position,
        )

    def _update_stabilizer_and_normalizer(
        self, position: Index, state: _State, if_counts: Callable, raw_input: jax.Array, raw_forget: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return the next stabiliser and normaliser, the decayed cell, and the input gate."""
        rest = jnp.log(1 + jnp.exp(-jnp.abs(raw_forget)))
        log_kept = jnp.minimum(raw_forget, 0.0) - rest + state.stabilizer
        log_kept = jnp.where(state.normalizer == 0, -jnp.inf, log_kept)
        lead = raw_input - log_kept
        self._save(position, 0, if_counts(lead, -jnp.inf))
        self._save(position, 1, if_counts(-jnp.maximum(raw_forget, 0.0) - rest, -jnp.inf))
        input_gate, forget_gate = split_lead(lead)
        normalizer = forget_gate * state.normalizer + input_gate
        return jnp.maximum(log_kept, raw_input), normalizer, forget_gate * state.cell, input_gate

    def _preactivations(
        self,
        position: Index,
        carry: _Carry,
        meanwhile: list[Callable[[], Any]],
        unless_begins: Callable[[jax.Array], jax.Array],
        use: Callable[[jax.Array, jax.Array], tuple[jax.Array, ...]],
    ) -> tuple[jax.Array, ...]:
        """Compute the pre-activations of all gates, and apply `use` to the first two while the others are computed.

        The tasks in `meanwhile` run before any of them is complete.
        """
        blocks = range(self.tiling.num_warpgroups)
        exchanged = self.refs.exchange_smem.at[lax.rem(position, 2)]

        def scope(*accs: Ref) -> tuple[jax.Array, ...]:
            matmuls = [
                functools.partial(self.multiply, accs[gate], gate, k, exchanged.at[k], carry.zero)
                for gates in GATES_OF_HALVES
                for k in blocks
                for gate in gates
            ]
            start(matmuls, meanwhile)
            gates = self.wait_for_inputs(position, carry.prefetched)

            def raw(gate: int, num_pending: int) -> jax.Array:
                recurrent = plgpu.wgmma_accumulator_load(accs[gate], wait_n=num_pending)
                return gates[gate] + unless_begins(recurrent)

            num_pending = 2 * len(blocks)
            used = use(raw(INPUT, num_pending), raw(FORGET, num_pending))
            return (*used, raw(CELL, 0), raw(OUTPUT, 0))

        return pl.run_scoped(scope, *[plgpu.ACC((UNITS, ROWS), jnp.float32) for _ in range(4)])
