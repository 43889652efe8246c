"""One token of the mLSTM on a Hopper GPU, with the memory updated in place.

Decoding is limited by memory bandwidth: for a few dozen sequences, the memories are as large as the weights, so each is
read once and written once. Thread blocks share a head: each has a few columns of its memory,

    memory[t]     = keep memory[t-1] + write k v^T      in registers, 16 bytes per thread at a time
    numerator     = memory[t]^T q                       from the same registers

and one more has its normaliser:

    normalizer[t] = keep normalizer[t-1] + write k
    overlap       = normalizer[t] . q

Blocks run concurrently and in any order, so no block may write what another one reads. Therefore the gates and the
stabiliser are computed outside of the kernel, and XLA computes the quotient of numerator and denominator, fused with
the norm after the cell.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from xlstm_jax.kernels.mlstm import reference
from xlstm_jax.kernels.mlstm.state import MLSTMState
from xlstm_jax.kernels.mosaic_gpu.device import NUM_SMS
from xlstm_jax.kernels.mosaic_gpu.pallas import Interpret, Ref, pl, plgpu

# 16 x 32 elements at a time: four rows per warp, eight lanes per row, so that each row is a full line of 128 bytes.
TILE = plgpu.Layout.TILED(plgpu.Tiling(((16, 32), (4, 32), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
# 32 elements of a vector at a time, eight per warp: the smallest store of full sectors of 32 bytes.
LINE = plgpu.Layout.TILED(
    plgpu.Tiling(((32,), (8,), (1,))), warp_dims=(-3,), lane_dims=(plgpu.Replicated(4), -2), vector_dim=-1
)
MULTIPLE = 32
MAX_QK_DIM = 256
NUMBERS_PER_BLOCK = 64 * 128
"""Elements of a memory per thread block: 64 registers per thread, so that four blocks fit on a multiprocessor."""
ENOUGH_BLOCKS = 2 * NUM_SMS


def step_problem(q: jax.Array, k: jax.Array, v: jax.Array, state: MLSTMState) -> str | None:
    """Return why this kernel does not support these shapes, or `None` if it does."""
    qk_dim, v_dim = q.shape[-1], v.shape[-1]
    if qk_dim % MULTIPLE or v_dim % MULTIPLE or qk_dim > MAX_QK_DIM:
        return (
            f"its keys and values have {qk_dim} and {v_dim} features, and the kernel takes multiples of {MULTIPLE}, of "
            f"keys up to {MAX_QK_DIM}"
        )
    if any(x.dtype != jnp.float32 for x in state):
        return f"its state is {state.memory.dtype}, and the kernel takes float32"
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in (q, k, v)):
        return f"its inputs are {q.dtype}, {k.dtype} and {v.dtype}, and the kernel takes bfloat16 and float32"
    return None


def mosaic_step(
    state: MLSTMState,
    q: Float[Array, "b h k"],
    k: Float[Array, "b h k"],
    v: Float[Array, "b h v"],
    log_input: Float[Array, "b h"],
    log_forget: Float[Array, "b h"],
    *,
    eps: float,
    interpret: Interpret = None,
) -> tuple[Float[Array, "b h v"], MLSTMState]:
    """Compute `reference.step` in float32, with the state updated in place if it has no other use.

    Args:
        state: The memory before the token.
        q: Queries, bfloat16 or float32.
        k: Keys.
        v: Values.
        log_input: Logarithms of the input gates, float32.
        log_forget: Logarithms of the forget gates, float32.
        eps: Added to the denominator.
        interpret: How to simulate a GPU on a CPU.

    Returns:
        The hidden states in float32, and the memory after the token.
    """

    @jax.custom_batching.custom_vmap
    def update(*arguments):
        return _update(*arguments, interpret=interpret)

    @update.def_vmap
    def _(size, is_batched, *arguments):
        pairs = zip(arguments, is_batched, strict=True)
        whole = (x if batched else jnp.broadcast_to(x, (size, *x.shape)) for x, batched in pairs)
        results = update(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    @jax.custom_vjp
    def compute(state, *token):
        log_input, log_forget = token[3:]
        stabilizer = jnp.maximum(state.stabilizer + log_forget, log_input)
        keep = jnp.exp(log_forget + state.stabilizer - stabilizer)
        write = jnp.exp(log_input - stabilizer)
        numerator, overlap, normalizer, memory = update(*token[:3], keep, write, state.normalizer, state.memory)
        denominator = jnp.maximum(jnp.abs(overlap), jnp.exp(-stabilizer)) + eps
        return numerator / denominator[..., None], MLSTMState(memory, normalizer, stabilizer)

    def backward(residuals, gradients):
        """Differentiate the reference; speed does not matter, as training never runs token by token."""
        return jax.vjp(lambda state, *token: _reference_step(state, *token, eps=eps), *residuals)[1](gradients)

    compute.defvjp(lambda *arguments: (compute(*arguments), arguments), backward)
    return compute(state, q, k, v, log_input, log_forget)


def _reference_step(state, q, k, v, log_input, log_forget, *, eps):
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return reference.step(state, q, k, v, log_input, log_forget, eps=eps)


def _update(q, k, v, keep, write, normalizer, memory, *, interpret):
    """Run the kernel, and return the numerator, the overlap, and the new normaliser and memory."""
    batch_size, num_heads, qk_dim = q.shape
    v_dim = v.shape[-1]
    width = _columns_of_a_block(batch_size * num_heads, qk_dim, v_dim)
    num_blocks, scale = v_dim // width, qk_dim**-0.5
    # If these are adjacent results of one matmul, XLA passes the result on without a copy.
    token = jnp.concatenate([x.reshape(batch_size, 1, -1) for x in (q, k, v)], axis=2)[:, 0]

    def body(token_ref, keep_ref, write_ref, normalizer_ref, memory_ref, numerator_ref, overlap_ref):
        row, head, block = (lax.axis_index(name) for name in ("row", "head", "block"))
        columns = pl.ds(block * width, width)
        q_ref, k_ref = (token_ref.at[row, pl.ds((i * num_heads + head) * qk_dim, qk_dim)] for i in range(2))
        first_value = 2 * num_heads * qk_dim + head * v_dim + block * width
        kept, written = keep_ref[row, head], write_ref[row, head]

        def load(ref: Ref, layout: Any) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        def broadcast(x: jax.Array, axis: int) -> jax.Array:
            return lax.broadcast_in_dim(x, (qk_dim, width), [axis])

        @pl.when(block < num_blocks)
        def _() -> None:
            old = load(memory_ref.at[row, head, :, columns], TILE)
            queries, keys = (load(ref, TILE.reduce(1)) for ref in (q_ref, k_ref))
            values = load(token_ref.at[row, pl.ds(first_value, width)], TILE.reduce(0))
            new = kept * old + broadcast(written * keys, 0) * broadcast(values, 1)
            memory_ref[row, head, :, columns] = new
            numerator_ref[row, head, columns] = jnp.sum(broadcast(scale * queries, 0) * new, axis=0)

        @pl.when(block == num_blocks)
        def _() -> None:
            queries, keys, old = (load(ref, LINE) for ref in (q_ref, k_ref, normalizer_ref.at[row, head]))
            new = kept * old + written * keys
            normalizer_ref[row, head] = new
            overlap_ref[row, head] = jnp.sum(scale * queries * new)

    kernel = pl.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch_size, num_heads, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch_size, num_heads), jnp.float32),
        ),
        mesh=plgpu.Mesh(grid=(batch_size, num_heads, num_blocks + 1), grid_names=("row", "head", "block")),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        name="mlstm_step",
    )
    # A kernel writes in place to references among its arguments.
    normalizer_ref, memory_ref = jax.new_ref(normalizer), jax.new_ref(memory)
    numerator, overlap = kernel(token, keep, write, normalizer_ref, memory_ref)
    return numerator, overlap, jax.freeze(normalizer_ref), jax.freeze(memory_ref)


def _columns_of_a_block(num_memories: int, qk_dim: int, v_dim: int) -> int:
    """Return the number of columns that fit in the registers of a thread block, or fewer if blocks are too few."""
    width = MULTIPLE
    while (
        v_dim % (2 * width) == 0
        and 2 * width * qk_dim <= NUMBERS_PER_BLOCK
        and num_memories * v_dim // (2 * width) >= ENOUGH_BLOCKS
    ):
        width *= 2
    return width
