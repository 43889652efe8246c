"""The loops over the positions of an sLSTM, forwards and backwards, as each warpgroup of a block runs them.

With `lead` the logarithm of the input gate minus that of what the forget gate keeps, the stabilised gates are
`min(1, exp(lead))` and `min(1, exp(-lead))`: all that the backward pass needs to know of the stabiliser.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.pallas import pl, plgpu
from xlstm_jax.kernels.slstm.hopper.block import (
    CELL,
    CELLS,
    FORGET,
    INPUT,
    OUTPUT,
    TILE_ORDER,
    UNITS,
    Block,
    Options,
    Tiling,
    reciprocal,
    seen_as,
    split_lead,
    start,
)
from xlstm_jax.kernels.slstm.hopper.limits import ROWS


def forward_body(tiling: Tiling, options: Options, length: int) -> Callable[..., None]:
    """Return the kernel that reads gates, first state and flags, and writes hidden states and last state.

    If it saves, it also writes what the backward pass needs, of `saved_shape`.
    """
    gates_of_halves = (INPUT, FORGET), (CELL, OUTPUT)
    blocks = range(tiling.num_warpgroups)

    def body(tiles_ref, gates_ref, state_ref, flags_ref, hidden_ref, last_ref, *rest):
        saved_ref, scratch = (rest[0], rest[1:]) if options.saves else (None, rest)
        block = Block(tiling, options, tiles_ref, flags_ref, scratch)

        def ask(step):
            position = jnp.minimum(step, length - 1)
            return block.ask(step, [block.source(gates_ref, position, gate) for gate in range(4)])

        def hand_over(position, hidden):
            target = block.exchange.at[lax.rem(position, 2), block.warpgroup].transpose((1, 0))
            target[...] = hidden.astype(jnp.bfloat16)
            block.publish()

        def save(position, index, value):
            if saved_ref is not None:
                mine = block.saved(saved_ref, position).at[index, block.warpgroup]
                seen_as(CELLS, mine)[...] = value

        def writes(position, hidden, cell_input, raw_output):
            return [
                lambda: block.store(hidden_ref, position, value=hidden),
                lambda: save(position, 2, cell_input),
                lambda: save(position, 3, raw_output),
            ]

        def preactivations(position, zero, asked, meanwhile: list, if_kept: Callable, use: Callable):
            """Call `use` with the pre-activations of two gates while those of the others are computed.

            While nothing is there yet, do what is in `meanwhile`.
            """
            exchanged = block.exchange.at[lax.rem(position, 2)]

            def scope(*accumulators):
                products = [
                    functools.partial(block.multiply, accumulators[gate], gate, k, exchanged.at[k], zero)
                    for gates in gates_of_halves
                    for k in blocks
                    for gate in gates
                ]
                start(products, meanwhile)
                gates = block.receive(position, asked)

                def raw(gate, pending):
                    recurrent = plgpu.wgmma_accumulator_load(accumulators[gate], wait_n=pending)
                    return gates[gate] + if_kept(recurrent)

                pending = 2 * len(blocks)
                used = use(raw(INPUT, pending), raw(FORGET, pending))
                return (*used, raw(CELL, 0), raw(OUTPUT, 0))

            return pl.run_scoped(scope, *[plgpu.ACC((UNITS, ROWS), jnp.float32) for _ in range(4)])

        def step(position, carry):
            results, state, flags, asked, zero = carry
            unless_begins, if_counts = block.select(flags)
            following_flags = block.flags(jnp.minimum(position + 1, length - 1))
            hidden, cell, normalizer, stabilizer = map(unless_begins, (results[0], *state))
            into_ring = [lambda: ask(position + tiling.ring_depth - 1)] if tiling.ring_depth else []
            following_asked = () if tiling.ring_depth else ask(position + 1)
            # At the first position there are no results yet: what is written is overwritten at the second one.
            meanwhile = [
                *writes(jnp.maximum(position - 1, 0), *results),
                lambda: save(position, 4, cell),
                lambda: save(position, 5, if_counts(normalizer, 1.0)),
                *into_ring,
            ]
            block.await_others()

            def with_input_and_forget(raw_input, raw_forget):
                rest = jnp.log(1 + jnp.exp(-jnp.abs(raw_forget)))
                log_kept = jnp.minimum(raw_forget, 0.0) - rest + stabilizer
                log_kept = jnp.where(normalizer == 0, -jnp.inf, log_kept)
                lead = raw_input - log_kept
                save(position, 0, if_counts(lead, -jnp.inf))
                save(position, 1, if_counts(-jnp.maximum(raw_forget, 0.0) - rest, -jnp.inf))
                input_gate, forget_gate = split_lead(lead)
                next_normalizer = forget_gate * normalizer + input_gate
                return jnp.maximum(log_kept, raw_input), next_normalizer, forget_gate * cell, input_gate

            next_stabilizer, next_normalizer, kept, input_gate, raw_cell, raw_output = preactivations(
                position, zero, asked, meanwhile, unless_begins, with_input_and_forget
            )
            cell_input = 2 * reciprocal(1 + jnp.exp(-2 * raw_cell)) - 1
            next_cell = kept + input_gate * cell_input
            scale = reciprocal((1 + jnp.exp(-raw_output)) * next_normalizer)
            next_hidden = if_counts(scale * next_cell, hidden)
            hand_over(position + 1, next_hidden)
            news = zip((next_cell, next_normalizer, next_stabilizer), (cell, normalizer, stabilizer), strict=True)
            return (
                (next_hidden, cell_input, if_counts(raw_output, -jnp.inf)),
                tuple(if_counts(new, old) for new, old in news),
                following_flags,
                following_asked,
                zero & position,
            )

        asked = ask(0)
        for i in range(1, tiling.ring_depth - 1):
            ask(i)
        hidden, *state = (block.load(state_ref, i) for i in range(4))
        hand_over(0, hidden)
        carry = (hidden, hidden, hidden), tuple(state), block.flags(0), asked, block.unknown_zero()
        results, state, *_ = lax.fori_loop(np.int32(0), np.int32(length), step, carry)
        for write in writes(length - 1, *results):
            write()
        for i, value in enumerate((results[0], *state)):
            block.store(last_ref, i, value=value)
        block.await_others()
        block.drain(range(length, length + tiling.ring_depth - 1))

    return body


class Factors(NamedTuple):
    """What a position multiplies gradients with, all `[units, rows]`, and the gradient that it adds."""

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


def backward_body(tiling: Tiling, options: Options, length: int) -> Callable[..., None]:
    """Return the kernel that reads what was saved and the gradients of hidden states and last state.

    It writes the gradients of the pre-activations and of the first state.
    """
    blocks = range(tiling.num_warpgroups)

    def body(tiles_ref, saved_ref, dhidden_ref, dlast_ref, flags_ref, draws_ref, dfirst_ref, *scratch):
        block = Block(tiling, options, tiles_ref, flags_ref, scratch)

        def position_of(step):
            return jnp.maximum(length - 1 - step, 0)

        def ask(step):
            position = position_of(step)
            saved = block.saved(saved_ref, position).at[:, block.warpgroup]
            return block.ask(step, [saved, block.source(dhidden_ref, position)])

        def prepare(step, asked, zero):
            """Compute all that does not depend on the gradient of the hidden states of later positions.

            The branch is always taken. Without it, the compiler moves all this to where it is used: after the product.
            """
            received = block.receive(step, asked)
            return lax.cond(zero == 0, factors_of, lambda *inputs: Factors(*inputs, *inputs[:3]), *received)

        def factors_of(lead, log_not_forget, cell_input, raw_output, cell_before, normalizer_before, dhidden):
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

        def to_hidden(buffer, zero, meanwhile: list):
            """Multiply the gradients of all pre-activations with the recurrent kernel.

            During that, do what is in `meanwhile`; the result of the last is returned too.
            """

            def scope(*accumulators):
                def product(gate, k):
                    exchanged = block.exchange.at[buffer, gate * len(blocks) + k]
                    block.multiply(accumulators[gate % 2], gate, k, exchanged, zero)

                order = TILE_ORDER[::2] + TILE_ORDER[1::2]
                products = [functools.partial(product, gate, k) for k in blocks for gate in order]
                *_, computed = start(products, meanwhile)
                first, second = (plgpu.wgmma_accumulator_load(accumulator) for accumulator in accumulators)
                return first + second, computed

            return pl.run_scoped(scope, *[plgpu.ACC((UNITS, ROWS), jnp.float32) for _ in range(2)])

        def step(i, carry):
            passed, dcell, dnormalizer, factors, zero, *flags = carry
            unless_begins, if_counts = block.select(tuple(flags))
            buffer = lax.rem(i, 2)
            following_flags = block.flags(position_of(i + 1))
            dhidden = passed + factors.dhidden
            dcell = dcell + dhidden * factors.to_cell
            dnormalizer = dnormalizer + dhidden * factors.to_normalizer
            draws = {
                INPUT: dcell * factors.cell_to_input + dnormalizer * factors.normalizer_to_input,
                FORGET: dcell * factors.cell_to_forget + dnormalizer * factors.normalizer_to_forget,
                CELL: dcell * factors.to_cell_input,
                OUTPUT: dhidden * factors.to_output,
            }
            for gate, draw in draws.items():
                target = block.exchange.at[buffer, gate * len(blocks) + block.warpgroup].transpose((1, 0))
                target[...] = draw.astype(jnp.bfloat16)
            block.publish()
            dcell, dnormalizer = dcell * factors.forget_gate, dnormalizer * factors.forget_gate
            writes = [
                functools.partial(block.store, draws_ref, length - 1 - i, gate, value=draw)
                for gate, draw in draws.items()
            ]
            into_ring = [lambda: ask(i + tiling.ring_depth)] if tiling.ring_depth else []
            asked = () if tiling.ring_depth else ask(i + 1)
            block.await_others()
            passed, following = to_hidden(buffer, zero, [*writes, *into_ring, lambda: prepare(i + 1, asked, zero)])
            passed = passed + if_counts(0.0, dhidden)
            return (*map(unless_begins, (passed, dcell, dnormalizer)), following, zero & i, *following_flags)

        asked = ask(0)
        for i in range(1, tiling.ring_depth):
            ask(i)
        last = [block.load(dlast_ref, i) for i in range(3)]
        zero = block.unknown_zero()
        carry = (*last, prepare(0, asked, zero), zero, *block.flags(length - 1))
        first = lax.fori_loop(np.int32(0), np.int32(length), step, carry)
        block.drain(range(length + 1, length + tiling.ring_depth))
        for i in range(3):
            block.store(dfirst_ref, i, value=first[i])

    return body
