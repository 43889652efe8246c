"""The mLSTM on a CPU: our chunkwise form against every native JAX form of the package mlstm-kernels.

    pip install --no-deps mlstm-kernels==2.0.6
    python benchmarks/cpu.py [--rounds 15]

Times the gradients of all inputs (forward and backward) at the shapes `CPU` of `kernels/mlstm/arg_specs.py`. The forms
take turns in one run, as machines are shared, and each timed call follows another of the same form, as in training.
What is given is the median over the rounds of the ratio to our time in the same round, with its quartiles. Every form
gets its own layout. Memory is what XLA reserves for temporaries. The errors are relative to the recurrence in float64,
the largest over the inputs: some forms leave out gradients, as docs/explanation/mlstm-gradients.md says.
"""

import argparse
import functools
import importlib
import importlib.util
import math
import pathlib
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.mlstm.arg_specs import CPU, ArgSpec

PEER = "mlstm_kernels"
FORMS = {
    "chunkwise autograd, 64": ("chunkwise.native.fwbw", "mlstm_chunkwise__native_autograd", {"chunk_size": 64}),
    "chunkwise autograd, 32": ("chunkwise.native.fwbw", "mlstm_chunkwise__native_autograd", {"chunk_size": 32}),
    "parallel autograd": ("parallel.native.fwbw", "mlstm_parallel__native_autograd", {}),
    "parallel custbw": (
        "parallel.native.fwbw",
        "mlstm_parallel__native_custbw",
        {"autocast_kernel_dtype": jnp.float32},
    ),
    "stablef autograd": ("parallel.native_stablef.fwbw", "mlstm_parallel__native_stablef_autograd", {}),
    "stablef custbw": (
        "parallel.native_stablef.fwbw",
        "mlstm_parallel__native_stablef_custbw",
        {"autocast_kernel_dtype": jnp.float32},
    ),
}


def peer_form(module: str, function: str, options: dict) -> Callable:
    """Import a native form of the peer, without what its packages import, which needs Triton."""
    spec = importlib.util.find_spec(PEER)
    folder = pathlib.Path(spec.origin if spec and spec.origin else PEER).parent
    parts = f"{PEER}.jax.{module}".split(".")
    for end in range(2, len(parts)):
        package = types.ModuleType(".".join(parts[:end]))
        package.__path__ = [str(folder.joinpath(*parts[1:end]))]
        sys.modules.setdefault(package.__name__, package)
    return functools.partial(getattr(importlib.import_module(".".join(parts)), function), **options)


def heads_first(tree: Any) -> Any:
    """Swap positions and heads: the peer's layout has the heads before the positions, ours after them."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2), tree)


def gradients(form: Callable, inputs: tuple[jax.Array, ...], projection: jax.Array) -> tuple[jax.Array, ...]:
    """Compute the gradients of a projection of the outputs."""
    return jax.grad(lambda *inputs: jnp.sum(form(*inputs) * projection), argnums=(0, 1, 2, 3, 4))(*inputs)


def exact_gradients(*arguments: Any) -> list[np.ndarray]:
    """Compute the gradients in float64, token by token."""
    reference = functools.partial(mlstm, backend="reference")
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), arguments)
        return jax.device_get(jax.jit(functools.partial(gradients, reference))(*arguments))


def error(actual: tuple, expected: list[np.ndarray]) -> float:
    """Return the largest relative error of the gradients, by norm."""
    pairs = zip(actual, expected, strict=True)
    return max(float(np.linalg.norm(np.asarray(a, np.float64) - e) / np.linalg.norm(e)) for a, e in pairs)


def measure(name: str, spec: ArgSpec, peers: dict[str, Callable], rounds: int) -> None:
    """Print a table of one shape."""
    inputs = spec.arguments(jax.random.key(0))
    arguments = inputs, jax.random.normal(jax.random.key(1), inputs[2].shape)
    ours = functools.partial(mlstm, chunk_size=spec.chunk_size, backend="chunkwise")
    calls = {"ours": (ours, arguments), **{peer: (form, heads_first(arguments)) for peer, form in peers.items()}}
    runs = {}
    for form, (function, given) in calls.items():
        compiled = jax.jit(functools.partial(gradients, function)).lower(*given).compile()
        runs[form] = functools.partial(compiled, *given), compiled.memory_analysis()
    expected = exact_gradients(*arguments)
    results = {form: run() if form == "ours" else heads_first(run()) for form, (run, _) in runs.items()}
    seconds = {form: [] for form in runs}
    for _ in range(rounds):
        for form, (run, _) in runs.items():
            jax.block_until_ready(run())
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[form].append(time.perf_counter() - start)
    sizes = f"B{spec.batch_size} S{spec.length} H{spec.num_heads} qk{spec.qk_dim} v{spec.v_dim}"
    print(f"\n{name}: {sizes}; ours takes {1e3 * np.median(seconds['ours']):.1f} ms\n")
    print("| form | time / ours (quartiles) | temporaries, MiB | error of gradients |\n|---|---|---|---|")
    for form, (_, memory) in runs.items():
        low, ratio, high = np.quantile(np.divide(seconds[form], seconds["ours"]), (0.25, 0.5, 0.75))
        mebibytes = getattr(memory, "temp_size_in_bytes", math.nan) / 2**20
        relative = error(results[form], expected)
        print(f"| {form} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {mebibytes:.0f} | {relative:.0e} |", flush=True)


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description="Time the forms of the mLSTM on a CPU.")
    parser.add_argument("--rounds", type=int, default=15, help="how often every form runs")
    rounds = parser.parse_args().rounds
    jax.config.update("jax_platforms", "cpu")
    peers = {}
    if importlib.util.find_spec(PEER) is None:
        print(f"{PEER} is not installed, so ours runs alone.")
    else:
        peers = {name: peer_form(*form) for name, form in FORMS.items()}
    for name, spec in CPU.items():
        measure(name, spec, peers, rounds)


if __name__ == "__main__":
    main()
