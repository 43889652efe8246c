"""The loops over the positions of an sLSTM, forwards and backwards, as each warpgroup of a block runs them.

With `lead` the logarithm of the input gate minus that of what the forget gate keeps, the stabilised gates are
`min(1, exp(lead))` and `min(1, exp(-lead))`: all that the backward pass needs to know of the stabiliser.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

from xlstm_jax.kernels.mosaic_gpu import pl, plgpu
from xlstm_jax.kernels.slstm.mosaic.block import (
    CELL,
    FORGET,
    INPUT,
    OUTPUT,
    TILE_ORDER,
    UNITS,
    WGMMA,
    Block,
    Options,
    Tiling,
    by_row,
    reciprocal,
    split_lead,
)
from xlstm_jax.kernels.slstm.mosaic.limits import ROWS, SAVED


def forward_body(tiling: Tiling, options: Options, length: int) -> Callable[..., None]:
    """Return the kernel that reads gates, first state and flags, and writes hidden states and last state.

    If it saves, it also writes what the backward pass needs, `[position, head, group, SAVED, units, rows]`.
    """
    gates_of_halves = (INPUT, FORGET), (CELL, OUTPUT)
    blocks = range(tiling.num_warpgroups)

    def body(tiles_ref, gates_ref, state_ref, flags_ref, hidden_ref, last_ref, *rest):
        saved_ref, scratch = (rest[0], rest[1:]) if options.saves else (None, rest)
        tiles_smem, hidden_smem, *barriers = scratch
        block = Block(tiling, options, tiles_ref, flags_ref, tiles_smem, barriers)
        head, group, warpgroup, units = block.head, block.group, block.warpgroup, block.units

        def fetch(position):
            gates = [block.load(gates_ref, position, gate) for gate in range(4)]
            return (*gates, *block.flags(position))

        def hand_over(position, hidden):
            target = hidden_smem.at[lax.rem(position, 2), warpgroup].transpose((1, 0))
            target[...] = hidden.astype(jnp.bfloat16)
            block.publish()

        def save(position, index, value):
            if saved_ref is not None:
                saved_ref[position, head, group, index, units] = value

        def preactivations(position, asked, if_kept: Callable, use: Callable):
            """Call `use` with the pre-activations of two gates while those of the others are computed."""
            exchanged = hidden_smem.at[lax.rem(position, 2)]

            def scope(*accumulators):
                for gates in gates_of_halves:
                    for k in blocks:
                        for gate in gates:
                            block.multiply(accumulators[gate], gate, k, exchanged.at[k])
                gates = [by_row(x) for x in asked]

                def raw(gate, pending):
                    recurrent = plgpu.wgmma_accumulator_load(accumulators[gate], wait_n=pending)
                    return gates[gate] + if_kept(recurrent)

                pending = 2 * len(blocks)
                used = use(raw(INPUT, pending), raw(FORGET, pending))
                return (*used, raw(CELL, 0), raw(OUTPUT, 0))

            return pl.run_scoped(scope, *[plgpu.ACC((UNITS, ROWS), jnp.float32) for _ in range(4)])

        def step(position, carry):
            hidden, cell, normalizer, stabilizer, *fetched = carry
            asked, flags = fetched[:4], fetched[4:]
            unless_begins, if_counts = block.select(tuple(flags))
            following = jnp.minimum(position + 1, length - 1)
            if tiling.fetches_early:
                fetched = fetch(following)
            hidden, cell, normalizer, stabilizer = map(unless_begins, (hidden, cell, normalizer, stabilizer))
            save(position, 4, cell)
            save(position, 5, if_counts(normalizer, 1.0))
            block.await_others()

            def with_input_and_forget(raw_input, raw_forget):
                decay = jnp.exp(-jnp.abs(raw_forget))
                log_forget = jnp.minimum(raw_forget, 0.0) - jnp.log(1 + decay)
                log_kept = jnp.where(normalizer == 0, -jnp.inf, log_forget + stabilizer)
                lead = raw_input - log_kept
                save(position, 0, if_counts(lead, -jnp.inf))
                save(position, 1, if_counts(jnp.where(raw_forget > 0, decay, 1.0) * reciprocal(1 + decay), 0.0))
                input_gate, forget_gate = split_lead(lead)
                next_normalizer = forget_gate * normalizer + input_gate
                next_stabilizer = jnp.maximum(log_kept, raw_input)
                return next_stabilizer, next_normalizer, reciprocal(next_normalizer), forget_gate * cell, input_gate

            next_stabilizer, next_normalizer, scale, kept, input_gate, raw_cell, raw_output = preactivations(
                position, asked, unless_begins, with_input_and_forget
            )
            cell_input = 2 * reciprocal(1 + jnp.exp(-2 * raw_cell)) - 1
            output_gate = reciprocal(1 + jnp.exp(-raw_output))
            next_cell = kept + input_gate * cell_input
            next_hidden = if_counts(output_gate * scale * next_cell, hidden)
            hand_over(position + 1, next_hidden)
            block.store(hidden_ref, position, value=next_hidden)
            save(position, 2, cell_input)
            save(position, 3, if_counts(output_gate, 0.0))
            if not tiling.fetches_early:
                fetched = fetch(following)
            return (
                next_hidden,
                if_counts(next_cell, cell),
                if_counts(next_normalizer, normalizer),
                if_counts(next_stabilizer, stabilizer),
                *fetched,
            )

        first = [by_row(block.load(state_ref, i)) for i in range(4)]
        hand_over(0, first[0])
        last = lax.fori_loop(np.int32(0), np.int32(length), step, (*first, *fetch(0)))
        block.await_others()
        for i in range(4):
            block.store(last_ref, i, value=last[i])

    return body


def backward_body(tiling: Tiling, options: Options, length: int) -> Callable[..., None]:
    """Return the kernel that reads what was saved and the gradients of hidden states and last state.

    It writes the gradients of the pre-activations and of the first state.
    """
    blocks = range(tiling.num_warpgroups)

    def body(tiles_ref, saved_ref, dhidden_ref, dlast_ref, flags_ref, draws_ref, dfirst_ref, *scratch):
        tiles_smem, draws_smem, *barriers = scratch
        block = Block(tiling, options, tiles_ref, flags_ref, tiles_smem, barriers)
        head, group, warpgroup, units = block.head, block.group, block.warpgroup, block.units

        def fetch(position):
            saved = saved_ref.at[position, head, group]
            saved = [plgpu.load(saved.at[i, units], layout=WGMMA, optimized=False) for i in range(SAVED)]
            return (*saved, block.load(dhidden_ref, position), *block.flags(position))

        def to_hidden(buffer):
            """Multiply the gradients of all pre-activations with the recurrent kernel."""

            def scope(*accumulators):
                for k in blocks:
                    for gate in TILE_ORDER[::2] + TILE_ORDER[1::2]:
                        exchanged = draws_smem.at[buffer, gate * len(blocks) + k]
                        block.multiply(accumulators[gate % 2], gate, k, exchanged)
                return sum(plgpu.wgmma_accumulator_load(accumulator) for accumulator in accumulators)

            return pl.run_scoped(scope, *[plgpu.ACC((UNITS, ROWS), jnp.float32) for _ in range(2)])

        def step(i, carry):
            dhidden, dcell, dnormalizer, *fetched = carry
            lead, not_forget, cell_input, output_gate, cell_before, normalizer_before = fetched[:SAVED]
            dhidden = dhidden + by_row(fetched[SAVED])
            unless_begins, if_counts = block.select(tuple(fetched[SAVED + 1 :]))
            position, buffer = length - 1 - i, lax.rem(i, 2)
            following = jnp.maximum(position - 1, 0)
            if tiling.fetches_early:
                fetched = fetch(following)

            input_gate, forget_gate = split_lead(lead)
            scale = reciprocal(forget_gate * normalizer_before + input_gate)
            ratio = (forget_gate * cell_before + input_gate * cell_input) * scale
            dratio = dhidden * output_gate
            dcell = dcell + dratio * scale
            dnormalizer = dnormalizer - dratio * scale * ratio
            draws = {
                INPUT: (dcell * cell_input + dnormalizer) * input_gate,
                FORGET: (dcell * cell_before + dnormalizer * normalizer_before) * forget_gate * not_forget,
                CELL: dcell * input_gate * (1 - cell_input * cell_input),
                OUTPUT: dratio * ratio * (1 - output_gate),
            }
            for gate, draw in draws.items():
                target = draws_smem.at[buffer, gate * len(blocks) + warpgroup].transpose((1, 0))
                target[...] = draw.astype(jnp.bfloat16)
            block.publish()
            for gate, draw in draws.items():
                block.store(draws_ref, position, gate, value=draw)
            if not tiling.fetches_early:
                fetched = fetch(following)
            block.await_others()
            passed = to_hidden(buffer) + if_counts(0.0, dhidden)
            return (*map(unless_begins, (passed, dcell * forget_gate, dnormalizer * forget_gate)), *fetched)

        last = [by_row(block.load(dlast_ref, i)) for i in range(3)]
        first = lax.fori_loop(np.int32(0), np.int32(length), step, (*last, *fetch(length - 1)))
        for i in range(3):
            block.store(dfirst_ref, i, value=first[i])

    return body
