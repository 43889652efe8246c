"""How long the mLSTM cell takes on a GPU: our kernels, plain XLA, the package mlstm-kernels, and attention.

    pip install mlstm-kernels==2.0.6        # for the peer, beside torch with CUDA and triton
    python benchmarks/kernels.py [--shapes 2] [--length 512] [--peers mlstm-kernels attention] [--chunk-sizes 256]
    python benchmarks/kernels.py --recipes --documents          # as the recipes call the cell in training
    python benchmarks/kernels.py --shapes 0 --heads 4 --head-dims 96 192 --chunk-sizes 64 256
    python benchmarks/kernels.py --shapes 5 6 7 --chunk-sizes 64 128 256 512 1024   # the recipes of the paper

All take turns in one run, on the same shapes, in bfloat16. A time is the median over groups of calls one after the
other, on the host's clock; a group is so long that the launch of its first call hardly counts. `forward+backward`
computes the gradients of all five inputs. With `--calls 100`, our forms are called so often within one program, each
time on inputs that the last results changed a little: what a small problem takes when no Python is in between.

The first five shapes are those that peers were measured at; only the first is that of a recipe (7B). `--recipes` takes
the shapes of the recipes at the batches of the throughput table, `--documents` resets the memory where packed documents
of about 1000 tokens begin, as training does. Peers have no such resets.

The floor is what a GPU needs at least: each input read and each output written once at 4.3 TB/s, or the products of the
chunkwise form (64 positions a chunk) at 790 TFLOP/s, whichever takes longer.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.dataset.synthetic_dataloading import draw_packed_batch
from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.mlstm.api import Backend, mosaic_problem
from xlstm_jax.utils.kernel_times import kernel_table, kernel_times

BANDWIDTH, FLOPS = 4.3e12, 790e12
GATE_MEANS = -3.0, 4.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a problem."""

    batch_size: int
    num_heads: int
    length: int
    qk_dim: int
    v_dim: int

    def __str__(self) -> str:
        return f"B{self.batch_size} H{self.num_heads} S{self.length} {self.qk_dim}/{self.v_dim}"

    def floor(self, *, backward: bool) -> float:
        """Return the seconds that a GPU needs at least."""
        rows, k, v, chunk = self.batch_size * self.num_heads * self.length, self.qk_dim, self.v_dim, 64
        forward_bytes, forward_flops = 2 * (2 * k + 2 * v), 4 * k * v + 2 * chunk * (k + v)
        if not backward:
            return rows * max(forward_bytes / BANDWIDTH, forward_flops / FLOPS)
        backward_bytes, backward_flops = 2 * (4 * k + 3 * v), 8 * k * v + chunk * (6 * k + 4 * v)
        return rows * max((forward_bytes + backward_bytes) / BANDWIDTH, (forward_flops + backward_flops) / FLOPS)

    def inputs(self, seed: int = 0) -> list[jax.Array]:
        """Draw queries, keys, values, both gates and a gradient of the outputs."""
        keys = jax.random.split(jax.random.key(seed), 6)
        sizes = (self.qk_dim, self.qk_dim, self.v_dim, None, None, self.v_dim)
        rows = self.batch_size, self.length, self.num_heads
        drawn = [
            jax.random.normal(
                key, rows if size is None else (*rows, size), jnp.float32 if size is None else jnp.bfloat16
            )
            for key, size in zip(keys, sizes, strict=True)
        ]
        return [*drawn[:3], drawn[3] + GATE_MEANS[0], drawn[4] + GATE_MEANS[1], drawn[5]]

    def document_borders(self) -> Any:
        """Draw where packed documents begin."""
        batch = draw_packed_batch(0, batch_size=self.batch_size, length=self.length, vocab_size=2)
        return batch.get_document_borders()


SHAPES = [
    Shape(8, 8, 8192, 256, 512),
    Shape(8, 16, 8192, 128, 256),
    Shape(8, 32, 8192, 64, 128),
    Shape(1, 8, 65536, 256, 512),
    Shape(8, 4, 8192, 256, 512),
    Shape(32, 4, 2048, 384, 384),  # paper_125m, larger than every tiling of the kernels
    Shape(32, 4, 2048, 512, 512),  # paper_350m, likewise
    Shape(32, 4, 2048, 256, 512),  # what the kernels take for a head of about that size
]
RECIPES = [
    Shape(16, 6, 8192, 64, 128),  # xlstm_160m
    Shape(16, 4, 8192, 128, 256),  # xlstm_400m
    Shape(8, 6, 8192, 128, 256),  # xlstm_830m
    Shape(8, 8, 8192, 128, 256),  # xlstm_1_4b
    Shape(8, 8, 8192, 256, 512),  # xlstm_7b
]
GROUPS, SECONDS_OF_GROUP = 9, 0.05
Timed = dict[str, tuple[float, ...]]
"""Seconds of forward, and of forward and backward, by name."""


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
    """Return the median time of a call."""

    def of_group(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        return (time.perf_counter() - start) / calls

    wait(call())
    calls = max(2, round(SECONDS_OF_GROUP / of_group(2)))
    return statistics.median(of_group(calls) for _ in range(GROUPS))


def time_ours(
    shape: Shape,
    backend: Backend,
    *,
    chunk_size: int = 256,
    calls: int = 1,
    shows_kernels: bool = False,
    has_documents: bool = False,
) -> tuple[float, ...]:
    """Time one of our forms, forward and with its backward pass."""
    resets = jnp.asarray(shape.document_borders()) if has_documents else None
    *inputs, dhidden = shape.inputs()
    wait = jax.block_until_ready

    def forward(*inputs: jax.Array) -> Any:
        return mlstm(*inputs, backend=backend, chunk_size=chunk_size, resets=resets)

    def both(dhidden: jax.Array, *inputs: jax.Array) -> Any:
        hidden, backward = jax.vjp(forward, *inputs)
        return hidden, backward(dhidden)

    def forward_again(inputs: list[jax.Array]) -> list[jax.Array]:
        return [*inputs[:3], inputs[3] + 1e-3 * forward(*inputs)[..., 0], inputs[4]]

    def both_again(inputs: list[jax.Array]) -> list[jax.Array]:
        _, gradients = both(dhidden, *inputs)
        return [x - 1e-3 * dx for x, dx in zip(inputs, gradients, strict=True)]

    def in_one_program(again: Callable[[list[jax.Array]], list[jax.Array]]) -> float:
        run = jax.jit(lambda inputs: lax.fori_loop(0, calls, lambda _, inputs: again(inputs), inputs))
        return seconds(lambda: run(inputs), wait) / calls

    if calls > 1:
        return in_one_program(forward_again), in_one_program(both_again)
    one, two = jax.jit(forward), jax.jit(both)
    times = seconds(lambda: one(*inputs), wait), seconds(lambda: two(dhidden, *inputs), wait)
    if shows_kernels:
        print(kernel_table(kernel_times(lambda: two(dhidden, *inputs))), end="\n\n", flush=True)
    return times


def time_attention(shape: Shape) -> tuple[float, float]:
    """Time causal attention of cuDNN, 32 heads of 128, on as many tokens."""
    rows = shape.batch_size, shape.length, 32, 128
    q, k, v, dhidden = (jax.random.normal(key, rows, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))

    def forward(*inputs: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*inputs, is_causal=True, implementation="cudnn")

    def both(dhidden: jax.Array, *inputs: jax.Array) -> Any:
        hidden, backward = jax.vjp(forward, *inputs)
        return hidden, backward(dhidden)

    one, two = jax.jit(forward), jax.jit(both)
    wait = jax.block_until_ready
    return seconds(lambda: one(q, k, v), wait), seconds(lambda: two(dhidden, q, k, v), wait)


def time_peer(shape: Shape, kernel: str) -> tuple[float, float]:
    """Time a kernel of mlstm-kernels, whose heads come before the positions."""
    import torch
    from mlstm_kernels.torch import get_mlstm_kernel

    run = get_mlstm_kernel(f"chunkwise--triton_{kernel}")
    rows = shape.batch_size, shape.num_heads, shape.length
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v, dhidden = (torch.randn(*rows, d, **draw) for d in (shape.qk_dim, shape.qk_dim, shape.v_dim, shape.v_dim))
    gates = [torch.randn(*rows, device="cuda") + mean for mean in GATE_MEANS]
    inputs = [x.requires_grad_() for x in (q, k, v, *gates)]

    def forward() -> Any:
        return run(*inputs, chunk_size=128)

    def both() -> Any:
        return torch.autograd.grad(forward(), inputs, dhidden)

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    with torch.no_grad():
        one = seconds(forward, wait)
    return one, seconds(both, wait)


def time_shape(shape: Shape, arguments: argparse.Namespace) -> Timed:
    """Time all that can run here."""
    timed: Timed = {}
    peers, calls = arguments.peers, arguments.calls
    if problem := mosaic_problem(jnp.bfloat16, shape.qk_dim, shape.v_dim):
        print(f"Our kernels do not run: {problem}.")
    else:
        timed["ours"] = time_ours(
            shape, "mosaic", calls=calls, shows_kernels=arguments.kernels, has_documents=arguments.documents
        )
    for chunk_size in arguments.chunk_sizes:
        name = f"plain XLA, chunks of {chunk_size}"
        try:
            timed[name] = time_ours(
                shape, "chunkwise", chunk_size=chunk_size, calls=calls, has_documents=arguments.documents
            )
        except jax.errors.JaxRuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}")
    if "mlstm-kernels" in peers:
        for kernel in ("xl_chunk", "xl_chunk_siging"):
            timed[f"mlstm-kernels {kernel}, chunks of 128"] = time_peer(shape, kernel)
    if "attention" in peers:
        timed["attention of cuDNN, 32 heads of 128"] = time_attention(shape)
    return timed


def main() -> None:
    """Print a table of each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="which, counted from zero")
    parser.add_argument("--recipes", action="store_true", help="the shapes of recipes")
    parser.add_argument("--documents", action="store_true", help="reset the memory where packed documents begin")
    parser.add_argument("--peers", nargs="*", default=[], choices=["mlstm-kernels", "attention"])
    parser.add_argument("--chunk-sizes", type=int, nargs="*", default=[], help="chunks of plain XLA")
    parser.add_argument("--kernels", action="store_true", help="what our forward and backward pass spends its time on")
    parser.add_argument("--batch", type=int, help="another number of sequences")
    parser.add_argument("--length", type=int, help="another length")
    parser.add_argument("--heads", type=int, help="another number of heads")
    parser.add_argument("--head-dims", type=int, nargs=2, default=(None, None), help="of keys and values")
    parser.add_argument("--calls", type=int, default=1, help="calls of our forms within one program")
    arguments = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}\n")
    for index in arguments.shapes:
        changes = {"batch_size": arguments.batch, "length": arguments.length, "num_heads": arguments.heads}
        changes |= dict(zip(("qk_dim", "v_dim"), arguments.head_dims, strict=True))
        shapes = RECIPES if arguments.recipes else SHAPES
        shape = dataclasses.replace(shapes[index], **{name: x for name, x in changes.items() if x is not None})
        floors = [shape.floor(backward=backward) for backward in (False, True)]
        print(f"{shape}, floor {1e3 * floors[0]:.2f} / {1e3 * floors[1]:.2f} ms\n")
        timed = time_shape(shape, arguments)
        print("| | forward ms | share of floor | forward+backward ms | share of floor | times ours |")
        print("|---|---|---|---|---|---|")
        ours = timed.get("ours")
        for name, times in timed.items():
            shares = [floor / t for floor, t in zip(floors, times, strict=True)]
            ratio = "-" if ours is None else f"{times[0] / ours[0]:.2f} / {times[1] / ours[1]:.2f}"
            figures = f"{1e3 * times[0]:.3f} | {shares[0]:.0%} | {1e3 * times[1]:.3f} | {shares[1]:.0%}"
            print(f"| {name} | {figures} | {ratio} |", flush=True)
        print()


if __name__ == "__main__":
    main()
