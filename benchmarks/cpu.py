"""Speed on a CPU: the mLSTM against other forms, and small training runs against the older package of this name.

    pip install --no-deps mlstm-kernels==2.0.6
    python benchmarks/cpu.py [--rounds 15] [--only kernels|runs]

Kernels: our chunkwise form against every native JAX form of the package mlstm-kernels. Times the gradients of all
inputs (forward and backward) at the shapes `CPU` of `kernels/mlstm/arg_specs.py`. The forms take turns in one run, as
machines are shared, and each timed call follows another of the same form, as in training. What is given is the median
over the rounds of the ratio to our time in the same round, with its quartiles. Every form gets its own layout. Memory
is what XLA reserves for temporaries. The errors are relative to the recurrence in float64, the largest over the inputs:
some forms leave out gradients, as docs/explanation/mlstm-gradients.md says.

Runs: a few steps of a trainer with its logging, in a process of its own, from its start to the end of the first step
and the median of the later ones, on random tokens, a document to a row. The shapes are those of the older package's
figures beside them, which are from a machine with two cores; no recipe has them. That machine is not this one, so the
rate of matrix products in this run is given too: at a rate `r` times as high as there, times would be `r` times as
short.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
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


RUNS = {
    "1 device, 256 × 8": ({"embedding_dim": 128, "num_blocks": 2}, (256, 8), 1, (12.4, 315)),
    "1 device, 1024 × 2": ({"embedding_dim": 128, "num_blocks": 2}, (1024, 2), 1, (14.4, 897)),
    "1 device, 512 × 4, 3.75 M parameters": ({"embedding_dim": 256, "num_blocks": 4}, (512, 4), 1, (13.6, 1384)),
    "dp2 × fsdp2 × tp2, 256 × 8": ({"embedding_dim": 128, "num_blocks": 2}, (256, 8), 8, (13.7, 231)),
}
"""Model, tokens of a batch, devices; seconds to the end of the first step and milliseconds of a step of the older
package with its fastest start, the form `parallel_stabilized`."""

NUM_STEPS = 12


def train_small(name: str, started: float) -> None:
    """Train for a few steps, and print the seconds since the start and those of a step as JSON."""
    from xlstm_jax.dataset.batch import LLMBatch
    from xlstm_jax.dataset.synthetic_dataloading import draw_packed_batch
    from xlstm_jax.distributed.mesh_utils import ParallelConfig
    from xlstm_jax.models.configs import ModelConfig
    from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
    from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
    from xlstm_jax.trainer.logger.base_logger import LoggerConfig
    from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig

    shape, (length, rows), num_devices, _ = RUNS[name]
    size = 2 if num_devices == 8 else 1
    parallel = ParallelConfig(
        fsdp_axis_size=size, model_axis_size=size, fsdp_modules=("Embed", "Block", "LMHead"), fsdp_min_weight_size=2**10
    )
    ends = []

    class Timed(LLMTrainer):
        def on_training_step(self, *arguments):
            jax.block_until_ready(self.state)
            ends.append(time.time())
            super().on_training_step(*arguments)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = Timed(
            LLMTrainerConfig(logger=LoggerConfig(log_path=pathlib.Path(folder))),
            ModelConfig(
                model_class=XLSTM,
                parallel=parallel,
                # So few blocks are compiled faster one by one than as a scan.
                model_config=XLSTMConfig(vocab_size=1024, num_heads=4, scan_blocks=False, parallel=parallel, **shape),
            ),
            OptimizerConfig(name="adamw"),
            LLMBatch.get_dtype_struct(rows, length),
        )
        tokens = draw_packed_batch(0, batch_size=rows, length=length, vocab_size=1024, mean_document_length=None)
        batch = jax.device_put(tokens, jax.NamedSharding(trainer.mesh, trainer.batch_partition_specs))
        trainer.train_model([batch] * NUM_STEPS, num_epochs=1)
        num_params = trainer.get_num_params()
    steps = np.diff(ends)
    print(json.dumps({"start": ends[0] - started, "step": float(np.median(steps)), "num_params": num_params}))


def matmul_rate() -> float:
    """Return the GFLOPs a second of a float32 matrix product, the best of a few."""
    x = jax.random.normal(jax.random.key(0), (1024, 1024))
    product = jax.jit(jnp.matmul)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times) / 1e9


def measure_runs(rounds: int) -> None:
    """Print a table of training runs."""
    print(f"\nMatrix products of 1024 × 1024 in float32: {matmul_rate():.0f} GFLOPs a second.\n")
    print("| run | parameters | start to first step, s | older | ours / older | step, ms | older | ours / older |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (_, _, num_devices, (start, step)) in RUNS.items():
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"}
        if num_devices > 1:
            flags["PJRT_NPROC"] = "64"  # Devices wait for each other in threads, of which there have to be enough.
        results = []
        for _ in range(rounds):
            command = [sys.executable, __file__, "--train", name, str(time.time())]
            done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
        ours = {key: float(np.median([result[key] for result in results])) for key in results[0]}
        milliseconds = 1e3 * ours["step"]
        print(
            f"| {name} | {ours['num_params'] / 1e6:.2f} M | {ours['start']:.1f} | {start} | "
            f"{ours['start'] / start:.2f} | {milliseconds:.0f} | {step} | {milliseconds / step:.2f} |",
            flush=True,
        )


def main() -> None:
    """Print a table for each shape, and one of training runs."""
    parser = argparse.ArgumentParser(description="Time the forms of the mLSTM and small training runs on a CPU.")
    parser.add_argument("--rounds", type=int, default=15, help="how often every form runs")
    parser.add_argument("--only", choices=("kernels", "runs"), help="one part alone")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = options.rounds
    jax.config.update("jax_platforms", "cpu")
    if options.train:
        train_small(options.train[0], float(options.train[1]))
        return
    if options.only != "kernels":
        measure_runs(rounds=3)
    if options.only == "runs":
        return
    peers = {}
    if importlib.util.find_spec(PEER) is None:
        print(f"{PEER} is not installed, so ours runs alone.")
    else:
        peers = {name: peer_form(*form) for name, form in FORMS.items()}
    for name, spec in CPU.items():
        measure(name, spec, peers, rounds)


if __name__ == "__main__":
    main()
