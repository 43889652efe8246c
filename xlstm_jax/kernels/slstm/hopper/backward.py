"""The backward kernel of the sLSTM: a reverse loop over the positions, run by each warpgroup of a thread block.

Of the stabiliser, it only needs `lead`, defined in `forward`.
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
    FORGET,
    INPUT,
    OUTPUT,
    TILE_ORDER,
    UNITS,
    Block,
    BlockRefs,
    Options,
    Tiling,
    reciprocal,
    split_lead,
    start,
)
from xlstm_jax.kernels.slstm.hopper.limits import ROWS


@dataclasses.dataclass(kw_only=True)
class BackwardRefs(BlockRefs):
    """The references of the kernel; `draws` are the gradients of the pre-activations."""

    saved: Ref  # of `saved_shape`
    dhidden: Ref  # [row, position, head, unit]
    dlast: Ref  # [row, (hidden, cell, normalizer), head, unit]
    draws: Ref  # [row, position, gate, head, unit]
    dfirst: Ref  # [row, (hidden, cell, normalizer), head, unit]


class Factors(NamedTuple):
    """The factors of gradients at a position, all `[units, rows]`, and the gradient to add."""

    dhidden: jax.Array
    to_cell: jax.Array
    to_normalizer: jax.Array
    to_output: jax.Array
    cell_to_input: jax.Array
    normalizer_to_input: jax.Array
    cell_to_forget: jax.Array
    normalizer_to_forget: jax.Array
    to_cell_input: jax.Array
    forget_gate: jax.Array


class _Carry(NamedTuple):
    """The loop carry of a warpgroup over positions."""

    dhidden: jax.Array
    dcell: jax.Array
    dnormalizer: jax.Array
    factors: Factors
    zero: jax.Array
    flags: tuple[jax.Array, ...]


class BackwardKernel(Block):
    """Reads the saved arrays and the gradients of hidden states and last state.

    It stores the gradients of the pre-activations and of the first state.
    """

    def __init__(self, tiling: Tiling, options: Options, length: int, refs: BackwardRefs):
        super().__init__(tiling, options, refs)
        self.length, self.refs = length, refs

    def run(self) -> None:
        """Loop over all positions."""
        depth, refs, length = self.tiling.ring_depth, self.refs, self.length
        prefetched = self._prefetch(0)
        for i in range(1, depth):
            self._prefetch(i)
        dhidden, dcell, dnormalizer = (self.load(refs.dlast, i) for i in range(3))
        zero = self.opaque_zero()
        factors = self._prepare(0, prefetched, zero)
        carry = _Carry(dhidden, dcell, dnormalizer, factors, zero, self.flags(length - 1))
        first = lax.fori_loop(np.int32(0), np.int32(length), self._step, carry)
        self.drain(range(length + 1, length + depth))
        for i in range(3):
            self.store(refs.dfirst, i, value=first[i])

    def _position(self, step: Index) -> Index:
        return jnp.maximum(self.length - 1 - step, 0)

    def _prefetch(self, step: Index) -> tuple[jax.Array, ...]:
        position = self._position(step)
        saved = self.saved(self.refs.saved, position).at[:, self.warpgroup]
        return self.prefetch(step, [saved, self.source(self.refs.dhidden, position)])

    def _prepare(self, step: Index, prefetched: tuple[jax.Array, ...], zero: jax.Array) -> Factors:
        """Compute everything that does not depend on the gradients of hidden states of later positions.

        The branch is always taken. Without it, the compiler would move the computation to its use, after the matmul.
        """
        inputs = self.wait_for_inputs(step, prefetched)
        return lax.cond(zero == 0, _factors, lambda *inputs: Factors(*inputs, *inputs[:3]), *inputs)

    def _step(self, i: Index, carry: _Carry) -> _Carry:
        depth, factors, zero = self.tiling.ring_depth, carry.factors, carry.zero
        unless_begins, if_counts = self.select(carry.flags)
        buffer = lax.rem(i, 2)
        next_flags = self.flags(self._position(i + 1))
        dhidden = carry.dhidden + factors.dhidden
        dcell = carry.dcell + dhidden * factors.to_cell
        dnormalizer = carry.dnormalizer + dhidden * factors.to_normalizer
        draws = {
            INPUT: dcell * factors.cell_to_input + dnormalizer * factors.normalizer_to_input,
            FORGET: dcell * factors.cell_to_forget + dnormalizer * factors.normalizer_to_forget,
            CELL: dcell * factors.to_cell_input,
            OUTPUT: dhidden * factors.to_output,
        }
        for gate, draw in draws.items():
            index = gate * self.tiling.num_warpgroups + self.warpgroup
            target = self.refs.exchange_smem.at[buffer, index].transpose((1, 0))
            target[...] = draw.astype(jnp.bfloat16)
        self.publish()
        dcell, dnormalizer = dcell * factors.forget_gate, dnormalizer * factors.forget_gate
        stores = [
            functools.partial(self.store, self.refs.draws, self.length - 1 - i, gate, value=draw)
            for gate, draw in draws.items()
        ]
        into_ring = [lambda: self._prefetch(i + depth)] if depth else []
        prefetched = () if depth else self._prefetch(i + 1)
        self.await_others()
        meanwhile = [*stores, *into_ring, lambda: self._prepare(i + 1, prefetched, zero)]
        dhidden_before, next_factors = self._multiply_by_recurrent(buffer, zero, meanwhile)
        dhidden_before = dhidden_before + if_counts(0.0, dhidden)
        dhidden, dcell, dnormalizer = map(unless_begins, (dhidden_before, dcell, dnormalizer))
        return _Carry(dhidden, dcell, dnormalizer, next_factors, zero & i, next_flags)

    def _multiply_by_recurrent(
        self, buffer: Index, zero: jax.Array, meanwhile: list[Callable[[], Any]]
    ) -> tuple[jax.Array, Any]:
        """Compute the matmul of the gradients of all pre-activations and the recurrent kernel.

        The tasks in `meanwhile` run during the matmul; the result of the last one is returned too.
        """
        blocks = range(self.tiling.num_warpgroups)

        def scope(*accs: Ref) -> tuple[jax.Array, Any]:
            def multiply(gate: int, k: int) -> None:
                exchanged = self.refs.exchange_smem.at[buffer, gate * len(blocks) + k]
                self.multiply(accs[gate % 2], gate, k, exchanged, zero)

            order = TILE_ORDER[::2] + TILE_ORDER[1::2]
            matmuls = [functools.partial(multiply, gate, k) for k in blocks for gate in order]
            *_, computed = start(matmuls, meanwhile)
            first, second = (plgpu.wgmma_accumulator_load(acc) for acc in accs)
            return first + second, computed

        return pl.run_scoped(scope, *[plgpu.ACC((UNITS, ROWS), jnp.float32) for _ in range(2)])


def _factors(
    lead: jax.Array,
    log_not_forget: jax.Array,
    cell_input: jax.Array,
    raw_output: jax.Array,
    cell_before: jax.Array,
    normalizer_before: jax.Array,
    dhidden: jax.Array,
) -> Factors:
    output_gate = reciprocal(1 + jnp.exp(-raw_output))
    input_gate, forget_gate = split_lead(lead)
    scale = reciprocal(forget_gate * normalizer_before + input_gate)
    ratio = (forget_gate * cell_before + input_gate * cell_input) * scale
    forgotten = forget_gate * jnp.exp(log_not_forget)
    return Factors(
        dhidden=dhidden,
        to_cell=output_gate * scale,
        to_normalizer=-output_gate * scale * ratio,
        to_output=output_gate * ratio * (1 - output_gate),
        cell_to_input=input_gate * cell_input,
        normalizer_to_input=input_gate,
        cell_to_forget=forgotten * cell_before,
        normalizer_to_forget=forgotten * normalizer_before,
        to_cell_input=input_gate * (1 - cell_input * cell_input),
        forget_gate=forget_gate,
    )
