"""What projections in float8 do to a model that learns: the same run in bfloat16, and in float8, beside it.

    python benchmarks/float8.py [--model 162m] [--batch 16] [--context 2048] [--steps 1000] [--rows 20]

Both begin with the same parameters and see the same batches, drawn from the bytes of Python's standard library. A row
has the mean loss of the steps since the last, in bits per byte; the last one that of bytes which no step has seen.
"""

import argparse
import math
import tempfile
import time

import jax
import numpy as np
from jax.sharding import NamedSharding
from train_step import MODELS, build

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.standard_library import load_standard_library
from xlstm_jax.trainer.metrics import get_metrics
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig

VALIDATION_BATCHES = 4


def load_bytes(*, validation: bool) -> np.ndarray:
    """Return one side of the corpus as one array."""
    documents = load_standard_library().documents
    return np.frombuffer(b"\0".join(d.content for d in documents if d.is_validation == validation), np.uint8)


def draw(text: np.ndarray, seed: int, options: argparse.Namespace) -> LLMBatch:
    """Draw windows of a text."""
    starts = np.random.default_rng(seed).integers(0, len(text) - options.context, options.batch)
    return LLMBatch.from_inputs(np.stack([text[start : start + options.context] for start in starts]).astype(np.int32))


def train(options: argparse.Namespace) -> tuple[list[float], float]:
    """Train a model; return the rows of its table, and the seconds of a step after the first."""
    text, unseen = load_bytes(validation=False), load_bytes(validation=True)
    bits = 1 / math.log(2)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(options, folder, optimizer(options))
        sharding = NamedSharding(trainer.mesh, trainer.batch_partition_specs)
        state, rows, begin = trainer.state, [], 0.0
        metrics = trainer.init_train_metrics()
        for step in range(1, options.steps + 1):
            state, metrics = trainer.train_step(state, jax.device_put(draw(text, step, options), sharding), metrics)
            if step == 1:
                jax.block_until_ready(state)
                begin = time.perf_counter()
            if step % (options.steps // options.rows) == 0:
                metrics, means = get_metrics(metrics)
                rows.append(bits * means["loss_mean"])
        seconds = (time.perf_counter() - begin) / max(options.steps - 1, 1)
        metrics = trainer.init_eval_metrics()
        for seed in range(VALIDATION_BATCHES):
            metrics = trainer.eval_step(state, jax.device_put(draw(unseen, seed, options), sharding), metrics)
        return [*rows, bits * get_metrics(metrics)[1]["loss"]], seconds


def optimizer(options: argparse.Namespace) -> OptimizerConfig:
    """Return AdamW, with a warm-up and a cosine."""
    schedule = SchedulerConfig(
        name="cosine_decay",
        lr=options.lr,
        warmup_steps=options.steps // 20,
        decay_steps=options.steps,
        end_lr_factor=0.1,
    )
    return OptimizerConfig(name="adamw", scheduler=schedule, weight_decay=0.1, grad_clip_norm=1.0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--context", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=10, help="rows of the table")
    parser.add_argument("--lr", type=float, default=1e-3, help="the largest learning rate")
    parser.add_argument("--remat", default="none", choices=["none", "dots", "full"])
    options = parser.parse_args()
    if options.rows < 1 or options.steps < 1 or options.steps % options.rows:
        parser.error(f"{options.steps} steps do not make {options.rows} rows: steps must be a multiple of rows")
    rest = {"backend": "auto", "chunk_size": 64, "unrolled": False}
    rest |= {"head_dtype": "bfloat16", "loss_chunk_size": 8192, "keep_logits": False}
    columns = [train(argparse.Namespace(**vars(options), **rest, float8=float8)) for float8 in (False, True)]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(options)}\n")
    print("| step | bfloat16 | float8 | difference |\n|---|---|---|---|")
    steps = [str((i + 1) * (options.steps // options.rows)) for i in range(options.rows)]
    for step, a, b in zip([*steps, "unseen"], *(losses for losses, _ in columns), strict=True):
        print(f"| {step} | {a:.4f} | {b:.4f} | {b / a - 1:+.2%} |")
    print("\nSeconds of a step: " + ", ".join(f"{seconds:.4f}" for _, seconds in columns))


if __name__ == "__main__":
    main()
