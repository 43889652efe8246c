"""How long attention within packed documents takes on a GPU, forward and with all three gradients, in bfloat16.

    python benchmarks/attention.py [--seconds 140] [--shapes 0 1] [--only dense causal "ours"]

Every candidate is first compared with XLA in float32 at a short length, then timed on documents of log-normal lengths
(1000 tokens on average, the last one of a row cut off), on short ones (250 on average) and on one document a row.
`causal` has no document mask: it does more products, and shows what cuDNN takes without any. At the full length, the
differences are those from the dense mask: relative norms, the worst of outputs and gradients.

`ours` are the kernels of the package for Hopper GPUs; `slots M` are its calls of cuDNN, with M slots for documents a
row, and several passes where there are more documents; `binding M` is JAX's own binding with at most M documents a row;
`tokamax` is a kernel for Hopper GPUs from that package, if it is installed.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.kernels.attention.api import document_attention
from xlstm_jax.kernels.attention.documents import number_documents
from xlstm_jax.kernels.attention.packed import packed_attention

Attend = Callable[..., jax.Array]
"""From queries, keys, values and segment ids to outputs."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a problem."""

    batch_size: int
    length: int
    num_heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.length}, {self.num_heads}/{self.kv_heads} heads of {self.head_dim}"

    def inputs(self, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
        """Draw queries, keys, values and a gradient of the outputs."""
        keys = jax.random.split(jax.random.key(0), 4)
        heads = self.num_heads, self.kv_heads, self.kv_heads, self.num_heads
        return [
            jax.random.normal(key, (self.batch_size, self.length, h, self.head_dim), jnp.bfloat16).astype(dtype)
            for key, h in zip(keys, heads, strict=True)
        ]


SHAPES = [Shape(16, 8192, 12, 12, 64), Shape(8, 8192, 16, 16, 128)]
SHORT = {64: Shape(2, 1024, 4, 2, 64), 128: Shape(2, 1024, 4, 2, 128)}


def draw_documents(batch_size: int, length: int, mean: float | None, seed: int = 0) -> np.ndarray:
    """Number the documents of each row; lengths are log-normal with this mean, or there is one document a row."""
    if mean is None:
        return np.ones((batch_size, length), np.int32)
    generator, sigma = np.random.default_rng(seed), 1.0
    lengths = np.maximum(generator.lognormal(np.log(mean) - sigma**2 / 2, sigma, (batch_size, length)), 2).astype(int)
    ends = np.cumsum(lengths, axis=1)
    return np.stack([np.searchsorted(row, np.arange(length), side="right") + 1 for row in ends]).astype(np.int32)


def xla(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Attend in float32, by XLA."""
    mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")


def dense(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Attend by cuDNN with a mask of all pairs of positions."""
    mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")


def causal(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Attend by cuDNN to all positions before, whatever document they are of."""
    del ids
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def slots(slots_per_row: int) -> Attend:
    """Return attention of the package, with so many slots for each row."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        return packed_attention(q, k, v, number_documents(ids), True, q.shape[-1] ** -0.5, slots_per_row)

    return attend


def ours(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """Attend by the kernels of the package for Hopper GPUs."""
    return document_attention(q, k, v, ids, causal=True, scale=None, backend="mosaic")


def binding(documents_a_row: int) -> Attend:
    """Return attention by JAX's own binding of cuDNN's packed layout."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        b, s = ids.shape
        borders = jnp.concatenate([jnp.ones((b, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        at = jnp.where(borders, jnp.cumsum(borders, axis=1) - 1, documents_a_row + 1)
        positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32), (b, s))
        starts = jnp.full((b, documents_a_row + 1), s, jnp.int32)
        starts = starts.at[jnp.arange(b)[:, None], at].set(positions, mode="drop")
        lengths = jnp.diff(starts, axis=1)
        lengths, starts = jnp.where(lengths > 0, lengths, -1), jnp.where(starts < s, starts, -1)
        return cudnn.dot_product_attention(
            q,
            k,
            v,
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=starts,
            kv_offsets=starts,
            scale=q.shape[-1] ** -0.5,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
        )

    return attend


def tokamax() -> Attend:
    """Return attention by tokamax's kernel for Hopper GPUs, which takes the first key of each query."""
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu  # pyright: ignore[reportMissingImports]

    op = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        b, s = ids.shape
        borders = jnp.concatenate([jnp.ones((b, 1), bool), ids[:, 1:] != ids[:, :-1]], axis=1)
        starts = jax.lax.cummax(jnp.where(borders, jnp.arange(s, dtype=jnp.int32), 0), axis=1)
        return op(q, k, v, mask=base.Mask(k_start=starts[:, None], is_causal=True))

    return attend


CANDIDATES: dict[str, tuple[Callable[[], Attend], int | None]] = {
    "dense": (lambda: dense, None),
    "ours": (lambda: ours, None),
    "causal": (lambda: causal, None),
    "binding 16": (functools.partial(binding, 16), 16),
    "tokamax": (tokamax, None),
    **{f"slots {m}": (functools.partial(slots, m), None) for m in (8, 16)},
    "xla": (lambda: xla, None),
}
"""By name: how to make it, and how many documents a row can have."""
BY_DEFAULT = ["dense", "ours", "causal", "binding 16", "tokamax"]
MEANS = {"packed": 1000, "short": 250, "one": None}


def both(attend: Attend) -> Callable[..., Any]:
    """Return outputs and gradients as a function of a gradient of the outputs, inputs and segment ids."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, ids: jax.Array) -> Any:
        out, backward = jax.vjp(lambda *inputs: attend(*inputs, ids), q, k, v)
        return out, *backward(dout)

    return run


def difference(results: Any, expected: Any) -> list[float]:
    """Return the norm of each difference, relative to the norm of what is expected."""
    pairs = [[x.astype(jnp.float32) for x in pair] for pair in zip(results, expected, strict=True)]
    return [float(jnp.linalg.norm((x - y).ravel()) / jnp.linalg.norm(y.ravel())) for x, y in pairs]


def seconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call, in three groups of calls one after the other."""

    def of_group(calls: int) -> float:
        result, start = None, time.perf_counter()
        for _ in range(calls):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    calls = max(2, min(50, round(0.08 / of_group(1))))
    return statistics.median(of_group(calls) for _ in range(3))


def fits(documents: np.ndarray, most: int | None) -> bool:
    """Tell whether a candidate has room for the documents of each row."""
    return most is None or (np.diff(documents, axis=1) != 0).sum(axis=1).max() < most


def run_candidate(name: str, shape: Shape, layouts: dict[str, np.ndarray], expected: dict[str, Any]) -> str:
    """Check and time one candidate; return its row of the table."""
    make, most = CANDIDATES[name]
    attend, small = make(), SHORT[shape.head_dim]
    small = dataclasses.replace(small, batch_size=min(small.batch_size, shape.batch_size))
    small = dataclasses.replace(small, length=min(small.length, shape.length))
    ids = jnp.asarray(draw_documents(small.batch_size, small.length, small.length / 8))
    if name == "causal":
        ids = jnp.ones_like(ids)
    start = time.perf_counter()
    reference = jax.jit(both(xla))(*small.inputs(jnp.float32), ids)
    checks = difference(jax.jit(both(attend))(*small.inputs(), ids), reference)
    print(f"  {name}: out, dq, dk, dv at {small}: {' '.join(f'{x:.1e}' for x in checks)}", flush=True)

    inputs = shape.inputs()
    q, k, v, _ = inputs
    some = jnp.asarray(layouts["packed"])
    one = jax.jit(lambda q, k, v, ids: attend(q, k, v, ids)).lower(q, k, v, some).compile()
    two = jax.jit(both(attend)).lower(*inputs, some).compile()
    memory = two.memory_analysis()
    gib = getattr(memory, "temp_size_in_bytes", 0) / 2**30
    preparation = time.perf_counter() - start
    cells, worst = [], 0.0
    for layout, documents in layouts.items():
        if not fits(documents, most):
            cells.append("- / -")
            continue
        ids = jnp.asarray(documents)
        results = jax.block_until_ready(two(*inputs, ids))
        if name == "dense":
            expected[layout] = results
        elif layout in expected and (name != "causal" or layout == "one"):
            worst = max(worst, *difference(results, expected[layout]))
        del results
        times = seconds(functools.partial(one, q, k, v, ids)), seconds(functools.partial(two, *inputs, ids))
        cells.append(" / ".join(f"{1e3 * seconds_of_call:.2f}" for seconds_of_call in times))
    figures = " | ".join(cells)
    return f"| {name} | {figures} | {gib:.2f} | {max(checks):.1e} | {worst:.1e} | {preparation:.0f} |"


def main() -> None:
    """Print what each candidate takes, and a table for each shape last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)), help="which, counted from zero")
    parser.add_argument("--only", nargs="*", default=BY_DEFAULT, choices=list(CANDIDATES))
    parser.add_argument("--seconds", type=float, default=140, help="begin nothing new after this time")
    parser.add_argument("--batch", type=int, help="another number of rows")
    parser.add_argument("--length", type=int, help="another length")
    arguments = parser.parse_args()
    sys.argv = sys.argv[:1]  # tokamax reads flags of its own.
    began, rows = time.perf_counter(), []
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for index in arguments.shapes:
        changes = {"batch_size": arguments.batch, "length": arguments.length}
        shape = dataclasses.replace(SHAPES[index], **{name: x for name, x in changes.items() if x is not None})
        layouts = {name: draw_documents(shape.batch_size, shape.length, mean) for name, mean in MEANS.items()}
        counts = {name: (np.diff(x, axis=1) != 0).sum(axis=1) + 1 for name, x in layouts.items()}
        documents = ", ".join(f"{name} {x.mean():.1f} (most {x.max()})" for name, x in counts.items())
        rows += ["", f"{shape}; documents a row: {documents}", ""]
        columns = " | ".join(f"{name} fwd / fwd+bwd ms" for name in layouts)
        rows += [
            f"| | {columns} | temporary GiB | error | off dense | s to prepare |",
            "|---" * (len(layouts) + 5) + "|",
        ]
        expected: dict[str, Any] = {}
        for name in arguments.only:
            if time.perf_counter() - began > arguments.seconds:
                rows.append(f"| {name} | out of time |")
                continue
            try:
                rows.append(run_candidate(name, shape, layouts, expected))
            except Exception as error:  # One that cannot run must not stop the others.
                where = traceback.extract_tb(error.__traceback__)[-1]
                message = " ".join(str(error).split())[:300]
                rows.append(f"| {name} | {type(error).__name__}: {message} ({where.filename}:{where.lineno}) |")
            print(rows[-1], flush=True)
    print("\n".join(rows))


if __name__ == "__main__":
    main()
