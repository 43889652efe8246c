"""How long the forms of the sLSTM take, forwards and with all gradients: the scans, and the kernel for Hopper GPUs.

    python benchmarks/slstm.py

Prints milliseconds and how much faster each is than `recompute`: the median over groups of calls back to back, for a
recurrent kernel in bfloat16. Without a Hopper GPU, shapes are small and the kernel is left out.
"""

import concurrent.futures
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
from xlstm_jax.kernels.slstm import slstm
from xlstm_jax.kernels.slstm.arg_specs import ArgSpec

FORMS = {
    "reference": ("reference", "float32"),
    "recompute": ("recompute", "float32"),
    "mosaic": ("mosaic", "float32"),
    "mosaic, gates in bfloat16": ("mosaic", "bfloat16"),
}
SHAPES = [ArgSpec(16, 2048, 4, 192), ArgSpec(8, 8192, 4, 64), ArgSpec(8, 8192, 4, 128)]
SMALL_SHAPES = [ArgSpec(4, 256, 4, 64)]


@functools.partial(jax.jit, static_argnames="backend")
def forward(gates: jax.Array, recurrent: jax.Array, projection: jax.Array, backend: Any) -> Any:
    """Compute hidden states and last state."""
    del projection
    return slstm(gates, recurrent, return_state=True, backend=backend)


@functools.partial(jax.jit, static_argnames="backend")
def with_gradients(gates: jax.Array, recurrent: jax.Array, projection: jax.Array, backend: Any) -> Any:
    """Compute the gradients of gates and recurrent kernel too."""

    def loss(gates: jax.Array, recurrent: jax.Array) -> tuple[jax.Array, Any]:
        hidden: Any = slstm(gates, recurrent, backend=backend)
        return jnp.sum(hidden.astype(jnp.float32) * projection), hidden

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(gates, recurrent)


def draw(spec: ArgSpec, gate_dtype: str) -> tuple[jax.Array, ...]:
    """Draw gates, a recurrent kernel in bfloat16, and what the loss projects on."""
    gates, recurrent = spec.arguments(jax.random.key(0))
    projection = jax.random.normal(jax.random.key(1), (spec.batch_size, spec.length, spec.num_heads, spec.head_dim))
    return gates.astype(gate_dtype), recurrent.astype(jnp.bfloat16), projection


def compile_all(shapes: list[ArgSpec], forms: list[str]) -> dict[tuple[ArgSpec, str, int], Callable]:
    """Compile everything at once, as that takes most of the time."""
    lowered = {}
    for spec in shapes:
        for form in forms:
            backend, gate_dtype = FORMS[form]
            arguments = jax.eval_shape(functools.partial(draw, spec, gate_dtype))
            for index, function in enumerate((forward, with_gradients)):
                lowered[spec, form, index] = function.lower(*arguments, backend=backend)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda stage: stage.compile(), lowered.values()), strict=True))


def milliseconds(function: Callable, arguments: tuple[jax.Array, ...]) -> float:
    """Return the median time of a call; functions that are slow are called less often."""

    def time_of(num_calls: int) -> float:
        start = time.perf_counter()
        results = [function(*arguments) for _ in range(num_calls)]
        jax.block_until_ready(results[-1])
        return (time.perf_counter() - start) / num_calls

    time_of(1)
    once = time_of(1)
    num_calls, num_groups = (4, 9) if once < 0.03 else (1, 3)
    return 1e3 * statistics.median(time_of(num_calls) for _ in range(num_groups))


def main() -> None:
    """Print a table of each shape."""
    problem = hopper_unavailable_reason()
    if problem is not None:
        print(f"The kernel is left out, as {problem}.\n")
    shapes = SHAPES if problem is None else SMALL_SHAPES
    forms = [form for form, (backend, _) in FORMS.items() if problem is None or backend != "mosaic"]
    compiled = compile_all(shapes, forms)
    for spec in shapes:
        print(f"Batch {spec.batch_size}, length {spec.length}, {spec.num_heads} heads of {spec.head_dim} units:\n")
        print("| form | forward, ms | faster | forward and backward, ms | faster |\n|---|---|---|---|---|")
        times = {}
        for form in forms:
            arguments = draw(spec, FORMS[form][1])
            times[form] = [milliseconds(compiled[spec, form, index], arguments) for index in range(2)]
        for form, both in times.items():
            columns = (f"{ms:.2f} | {base / ms:.1f}x" for ms, base in zip(both, times["recompute"], strict=True))
            print(f"| {form} | {' | '.join(columns)} |", flush=True)
        print()


if __name__ == "__main__":
    main()
