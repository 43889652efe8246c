"""Time to the first step of recipes, without and with compiled programs in the cache, phase by phase.

    python benchmarks/startup.py [--models xlstm_160m xlstm_1_4b] [--blocks scanned unrolled] [--kernels] [--tiny]

Each start is a process of its own, the command `xlstm-jax train`; the first and the second start of a case share a
cache folder that is empty at first. With --kernels, small programs with and without Mosaic GPU kernels come after: if
compilation and first run of such a program take as long with a filled cache as with an empty one, its kernels are not
in the cache. --tiny takes models for a CPU, where there are no such kernels. Each start is printed, and written to the
file of --json, as soon as it is measured.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH_SIZES = {"xlstm_160m": 16, "xlstm_1_4b": 8}
BLOCKS = {"scanned": "true", "unrolled": "false"}
RUN = (
    "data=synthetic",
    "num_train_steps=3",
    "scheduler.warmup_steps=0",
    "scheduler.cooldown_steps=0",
    "logger.log_every_n_steps=1",
    "callbacks.checkpoint=null",
    "callbacks.report=null",
)
TINY = (
    "model.embedding_dim=64",
    "model.num_heads=2",
    "model.num_blocks=3",
    "model.vocab_size=256",
    "context_length=64",
)
PHASES = (
    "imports",
    "settings",
    "devices",
    "data",
    "model",
    "trace",
    "lower",
    "compile",
    "header",
    "callbacks",
    "first_batch",
    "first_step",
)
PROGRAMS = (
    "plain norm × 12",
    "kernel of a norm",
    "kernel of a norm × 12",
    "plain mLSTM and gradients",
    "kernels of it",
)


def environment(cache: str) -> dict[str, str]:
    """Return the environment of a start: with our cache on a GPU, and with JAX's on a CPU, where we have none."""
    names = ("JAX_COMPILATION_CACHE_DIR", "XLSTM_JAX_CACHE_DIR")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    inherited["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    from xlstm_jax.cli.shared.gpu_memory import list_gpus

    if list_gpus():
        return inherited | {"XLSTM_JAX_CACHE_DIR": cache}
    return inherited | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**31),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def run_quietly(words: list[str], cache: str, folder: str, seconds: float) -> str:
    """Run a Python process for some seconds at most, and return what it printed."""
    try:
        child = subprocess.run(
            [sys.executable, *words],
            env=environment(cache),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(seconds, 0.0),
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError("the time is over") from None
    if child.returncode:
        raise RuntimeError(f"exit code {child.returncode}: {' '.join((child.stderr or child.stdout).split())[-400:]}")
    return child.stdout


def start(model: str, blocks: str, cache: str, seconds: float, *, is_tiny: bool) -> dict[str, Any]:
    """Start a run and return its phases and the time of its third step."""
    batch = 2 if is_tiny else BATCH_SIZES[model]
    words = ["-m", "xlstm_jax.cli.main", "train", f"experiment={model}", f"batch_size={batch}", *RUN]
    words += [f"model.scan_blocks={BLOCKS[blocks]}", *(TINY if is_tiny else ())]
    with tempfile.TemporaryDirectory() as folder:
        run_quietly([*words, "hydra.run.dir=run"], cache, folder, seconds)
        logs = Path(folder) / "run/file_logs"
        row = json.loads((logs / "metrics_startup.jsonl").read_text())
        rows = [json.loads(line) for line in (logs / "metrics_train.jsonl").read_text().splitlines()]
        return row | {"step": [row["step_time"] for row in rows if "step_time" in row][-1]}


@dataclasses.dataclass
class Results:
    """What was measured, in a file that is written after each start."""

    is_tiny: bool
    file: Path | None
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Add a start."""
        self.rows.append(row)
        if self.file is not None:
            self.file.write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")


def size_of(cache: str) -> str:
    """Return the number of programs in a cache, and its size."""
    files = [path for path in Path(cache).rglob("*") if path.is_file()]
    programs = sum(path.name.endswith("-cache") for path in files)
    return f"{programs} programs, {sum(path.stat().st_size for path in files) / 2**20:.1f} MiB"


def show_starts(cases: list[tuple[str, str]], seconds_left: Callable[[], float], results: Results) -> None:
    """Start each case twice, and print a line of the table after each start."""
    names = " | ".join(name.replace("_", " ") for name in PHASES)
    print("\nSeconds until the end of the first step:\n")
    print(
        f"| start | cache | total | {names} | programs, from the cache | seconds of them | a later step | cache holds |"
    )
    print("|---|---|" + "---|" * (len(PHASES) + 5), flush=True)
    for model, blocks in cases:
        totals = []
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            for state in ("empty", "filled"):
                try:
                    found = start(model, blocks, cache, seconds_left(), is_tiny=results.is_tiny)
                except RuntimeError as error:
                    print(f"| {model}, {blocks} | {state} | {error} |", flush=True)
                    break
                totals.append(found["startup_seconds"])
                results.add({"start": f"{model}, {blocks}", "cache": state, **found})
                phases = " | ".join(f"{found.get(f'startup_{name}', 0.0):.1f}" for name in PHASES)
                hits = f"{found['num_programs']}, {found.get('num_cache_hits', 'no cache')}"
                print(
                    f"| {model}, {blocks} | {state} | {totals[-1]:.1f} | {phases} | {hits} | "
                    f"{found['compile_seconds']:.1f} | {found['step']:.3f} | {size_of(cache)} |",
                    flush=True,
                )
        if len(totals) == 2:
            print(f"| {model}, {blocks} | filled / empty | {totals[1] / totals[0]:.2f} |", flush=True)


def show_kernels(seconds_left: Callable[[], float], results: Results) -> None:
    """Run each small program twice, in processes of their own, and print a line for each."""
    print("\nSeconds of small programs:\n")
    print("| program | cache | trace, lower | compile | first run | second run | from the cache |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for program in PROGRAMS:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
            for state in ("empty", "filled"):
                try:
                    words = [str(Path(__file__).resolve()), "--program", program]
                    found = json.loads(run_quietly(words, cache, cache, seconds_left()).splitlines()[-1])
                except RuntimeError as error:
                    found = {"problem": str(error)}
                if "problem" in found:
                    print(f"| {program} | {state} | {found['problem']} |", flush=True)
                    break
                results.add({"program": program, "cache": state, **found})
                print(
                    f"| {program} | {state} | {found['lower']:.2f} | {found['compile']:.2f} | {found['first']:.3f} | "
                    f"{found['second']:.3f} | {found['hits']} |",
                    flush=True,
                )


def run_program(name: str) -> dict[str, Any]:
    """Compile and run one of the small programs in this process."""
    import jax
    import jax.numpy as jnp

    from xlstm_jax.kernels.mlstm import mlstm
    from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
    from xlstm_jax.kernels.norms import reference
    from xlstm_jax.kernels.norms.api import rms_norm
    from xlstm_jax.recipes.compilation_cache import enable_compilation_cache

    is_kernel = name.startswith("kernel")
    if is_kernel and (problem := hopper_unavailable_reason()):
        return {"problem": f"there are no such kernels here, as {problem}"}
    enable_compilation_cache()
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: event.endswith("cache_hits") and hits.append(event))
    is_gpu = jax.default_backend() == "gpu"
    if "norm" in name:
        norm = rms_norm if is_kernel else reference.rms_norm
        args = (jnp.ones((65536 if is_gpu else 256, 768), jnp.bfloat16), jnp.ones(768))

        def function(x, scale):
            for _ in range(12 if "12" in name else 1):
                x = norm(x, scale, eps=1e-6)
            return x

    else:
        shape = (2, 8192, 6) if is_gpu else (1, 256, 2)
        q, v, gate = jnp.ones((*shape, 64), jnp.bfloat16), jnp.ones((*shape, 128), jnp.bfloat16), jnp.ones(shape)
        args = (q, q, v, gate, gate)
        backend = "mosaic" if is_kernel else "chunkwise"

        def loss(*args):
            return mlstm(*args, backend=backend).astype(jnp.float32).sum()

        function = jax.grad(loss, argnums=(0, 1, 2, 3, 4))

    jax.block_until_ready(args)
    hits.clear()
    times = [time.perf_counter()]
    lowered = jax.jit(function).lower(*args)
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    for _ in range(2):
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter())
    names = ("lower", "compile", "first", "second")
    seconds = {name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)}
    return {**seconds, "hits": len(hits)}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(BATCH_SIZES), choices=list(BATCH_SIZES))
    parser.add_argument("--blocks", nargs="*", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--kernels", action="store_true", help="small programs with and without Mosaic kernels too")
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--seconds", type=float, default=540.0, help="stop after so many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--program", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        print(json.dumps(run_program(args.program)))
        return
    begin = time.perf_counter()

    def seconds_left() -> float:
        return args.seconds - (time.perf_counter() - begin)

    results = Results(args.tiny, args.json)
    if args.models:
        show_starts([(model, blocks) for model in args.models for blocks in args.blocks], seconds_left, results)
    if args.kernels:
        show_kernels(seconds_left, results)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
