"""How fast a model writes on one GPU: milliseconds a token at several batch sizes, and tokens a second of a prompt.

    python benchmarks/decode.py [--variant split fused ...] [--flags default no-merge ...] [--batch 1 8 64]
    python benchmarks/decode.py --blocks 2 --dim 128 --vocab 256 --tokens 8 --prompt 64     # anywhere, in seconds

The model is xLSTM-7B with random weights in bfloat16 and states in float32. All tokens of a call are written by one
program on the device. The floor is the time to read all weights but the embedding once and the states of all sequences
once, and to write these once, at the rate of a copy. Beside it stand the figures of the package xlstm 2.0.6 for torch
on the same kind of GPU, an H200: a CUDA graph of one step, weights laid side by side, no prompt.

Variants say how weights and states lie:

    scan        stacked, and the program scans over blocks
    sliced      stacked, and the program takes them apart before its first token
    split       each block has arrays of its own
    fused       as `split`, and kernels that share an input lie side by side, as `inference.decoding.for_decoding` does
    transposed  as `fused`, with the numbers that make one output next to each other in memory

Flags are options of the compiler. It reads them once, so every pair of a variant and flags has a process of its own.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from xlstm_jax.inference.decoding import for_decoding
from xlstm_jax.inference.generate import generate
from xlstm_jax.inference.sampling import greedy_sampling
from xlstm_jax.models.shared.layout import to_canonical
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.models.xlstm.config import published
from xlstm_jax.utils.kernel_times import kernel_table, kernel_times

VARIANTS = ("scan", "sliced", "split", "fused", "transposed")
FLAGS = {
    "default": "",
    "no-merge": "--xla_gpu_dot_merger_threshold_mb=0",  # else products with one input become one, kernels copied
    "no-graphs": "--xla_gpu_enable_command_buffer=",
    "graph-of-all": "--xla_gpu_enable_command_buffer=+WHILE",  # the loop over tokens too
    "cublas": "--xla_gpu_enable_triton_gemm=false",
    "exhaustive": "--xla_gpu_exhaustive_tiling_search=true",
}
COPY_RATE = 4.3e12
"""Bytes a second that an H200 reads and writes together."""
PEER = {1: 6.82, 8: 8.73, 64: 17.0}
"""Milliseconds a token of xLSTM-7B."""


def random_params(shapes: Any) -> Any:
    """Draw parameters leaf by leaf: norms scale by one, all else is small."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return 0.02 * jax.random.normal(key, shape, dtype)

    seeds = itertools.count()

    def of_leaf(path: Any, leaf: Any) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        return draw(jax.random.key(next(seeds)), leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(of_leaf, shapes)


def lay_out(variant: str, config: XLSTMConfig) -> tuple[XLSTM, Any]:
    """Return a model and random parameters in the layout of a variant."""
    model = XLSTM(config)

    def init() -> Any:
        params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
        match variant:
            case "split":
                return to_canonical(params, config.kinds, config.scan_blocks)
            case "fused" | "transposed":
                return for_decoding(model, params)[1]
        return params

    params = random_params(jax.eval_shape(init))
    if variant == "transposed":
        params = jax.tree_util.tree_map_with_path(transposed, params)
    is_stacked = variant in ("scan", "sliced")
    return model if is_stacked else XLSTM(dataclasses.replace(config, scan_blocks=False)), params


def transposed(path: Any, leaf: jax.Array) -> jax.Array:
    """Store a kernel column by column; what it holds is the same."""
    return jax.device_put(leaf, Format(Layout((1, 0)), leaf.sharding)) if path[-1].key == "kernel" else leaf


def advance_with(variant: str, model: XLSTM, params: Any) -> tuple[XLSTM, Callable]:
    """Return a model and what runs tokens through it, inside a program."""
    if variant == "sliced":
        params = to_canonical(params, model.config.kinds, model.config.scan_blocks)
        model = XLSTM(dataclasses.replace(model.config, scan_blocks=False))

    def advance(tokens: jax.Array, state: Any) -> Any:
        return model.apply({"params": params}, tokens, state=state, return_state=True, last_only=True)

    return model, advance


def write(variant: str, model: XLSTM, num_tokens: int, params: Any, first: jax.Array) -> jax.Array:
    """Continue rows of one token."""
    model, advance = advance_with(variant, model, params)
    state = model.apply({}, first.shape[0], method="init_state")
    sample = greedy_sampling
    tokens, _ = generate(advance, state, jax.random.key(0), first, max_length=num_tokens, token_sample_fn=sample)
    return tokens


def read(variant: str, model: XLSTM, params: Any, prompt: jax.Array) -> Any:
    """Run a prompt through the model: the logits of its last position, and the state after it."""
    model, advance = advance_with(variant, model, params)
    return advance(prompt, model.apply({}, prompt.shape[0], method="init_state"))


def timed(function: Callable, *arguments: Any, calls: int) -> tuple[float, float, Any]:
    """Return the median of the seconds of a call, the seconds of the compilation, and the compiled program."""
    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compilation = time.perf_counter() - start
    jax.block_until_ready(compiled(*arguments))
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), compilation, compiled


def num_bytes(tree: Any) -> int:
    """Return the size of all arrays of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def measure(variant: str, options: argparse.Namespace) -> None:
    """Print the rows of a variant."""
    config = model_config(options)
    model, params = lay_out(variant, config)
    jax.block_until_ready(params)
    weights = num_bytes({name: tree for name, tree in params.items() if name != "token_embedding"})
    is_7b = (config.embedding_dim, config.num_blocks) == (4096, 32)
    name = f"{variant} | {options.flags[0]}"

    def finish(program: Any, arguments: tuple, row: str, compilation: float, label: str) -> None:
        """Print a row, and what else is asked for."""
        temporaries = getattr(program.memory_analysis(), "temp_size_in_bytes", math.nan) / 2**30
        print(f"| {name} | {row} | {temporaries:.1f} | {compilation:.0f} |", flush=True)
        if options.hlo:
            options.hlo.mkdir(parents=True, exist_ok=True)
            (options.hlo / f"{variant}-{options.flags[0]}-{label}.txt").write_text(program.as_text())
        if options.kernels:
            print(kernel_table(kernel_times(functools.partial(program, *arguments))), flush=True)

    for batch_size in options.batch:
        state = jax.eval_shape(lambda size=batch_size: model.apply({}, size, method="init_state"))
        function = functools.partial(write, variant, model, options.tokens)
        arguments = params, jax.random.randint(jax.random.key(2), (batch_size, 1), 0, config.vocab_size)
        seconds, compilation, program = timed(function, *arguments, calls=options.calls)
        milliseconds = 1e3 * seconds / options.tokens
        floor = 1e3 * (weights + 2 * num_bytes(state)) / COPY_RATE
        peer = PEER.get(batch_size) if is_7b else None
        against = f"{peer} | {peer / milliseconds:.2f}" if peer else "– | –"
        speed = f"{batch_size} | {milliseconds:.3f} | {1e3 * batch_size / milliseconds:.0f}"
        row = f"{speed} | {floor:.2f} | {floor / milliseconds:.0%} | {against}"
        finish(program, arguments, row, compilation, f"batch{batch_size}")
    if options.prompt:
        arguments = params, jax.random.randint(jax.random.key(1), (1, options.prompt), 0, config.vocab_size)
        seconds, compilation, program = timed(functools.partial(read, variant, model), *arguments, calls=options.calls)
        tokens_per_second = options.prompt / seconds
        row = f"prompt of {options.prompt} | {1e3 * seconds:.1f} in all | {tokens_per_second:.0f} | – | – | – | –"
        finish(program, arguments, row, compilation, "prompt")


def model_config(options: argparse.Namespace) -> XLSTMConfig:
    """Return the config of the model: xLSTM-7B, with what the options change."""
    shape = {"num_blocks": options.blocks, "embedding_dim": options.dim, "vocab_size": options.vocab}
    return published(
        "xLSTM-7B",
        **{name: value for name, value in shape.items() if value is not None},
        **({"chunk_size": options.chunk_size} if options.backend in ("auto", "chunkwise") else {}),
        mlstm_backend=options.backend,
        dtype="bfloat16",
        param_dtype="bfloat16",
        head_dtype="bfloat16",
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Time generation on one GPU.")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=["split", "fused"])
    parser.add_argument("--flags", nargs="+", choices=FLAGS, default=["default"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64], help="sequences that are written together")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a call")
    parser.add_argument("--prompt", type=int, default=8192, help="length of the prompt that is read; 0 for none")
    parser.add_argument("--calls", type=int, default=5, help="timed calls; their median is given")
    parser.add_argument("--backend", default="auto", help="the form of the mLSTM; `chunkwise` steps in plain JAX too")
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, help="a smaller model")
    parser.add_argument("--dim", type=int, help="a narrower model")
    parser.add_argument("--vocab", type=int, help="a smaller vocabulary")
    parser.add_argument("--kernels", action="store_true", help="what each program spends its time on, on a GPU")
    parser.add_argument("--hlo", type=pathlib.Path, help="a folder for the text of each compiled program")
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        measure(options.variant[0], options)
        return
    columns = "variant | flags | batch | ms a token | tokens/s | floor, ms | floor / ours | xlstm, ms | xlstm / ours"
    print(f"| {columns} | temporaries, GiB | compilation, s |\n|{'---|' * 11}", flush=True)
    for variant in options.variant:
        for flags in options.flags:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--flags", flags, "--row"]
            xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[flags]}".strip()
            subprocess.run(command, env=os.environ | {"XLA_FLAGS": xla_flags}, check=False)


if __name__ == "__main__":
    main()
