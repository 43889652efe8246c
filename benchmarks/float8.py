"""What projections in float8 do to a model that learns: the same run in bfloat16, and in float8, beside it.

    python benchmarks/float8.py [--model 160m] [--batch 16] [--context 2048] [--steps 1000] [--rows 20]

Both begin with the same parameters and see the same batches, drawn from the bytes of Python's standard library. A row
has the mean loss of the steps since the last, in bits per byte; the last one that of bytes which no step has seen. The
times of the first row are those of compiling, too.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import NamedSharding
from train_step import MODELS, build

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.sources.standard_library import load_standard_library
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


def train(options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Train a model, and yield for each row its loss and the seconds of a step, as far as it has come."""
    text, unseen = load_bytes(validation=False), load_bytes(validation=True)
    bits, steps_per_row = 1 / math.log(2), options.steps // options.rows
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(options, folder, optimizer(options))
        sharding = NamedSharding(trainer.mesh, trainer.batch_partition_specs)
        state, metrics = trainer.state, trainer.init_train_metrics()
        for row in range(options.rows):
            begin = time.perf_counter()
            for step in range(row * steps_per_row, (row + 1) * steps_per_row):
                state, metrics = trainer.train_step(state, jax.device_put(draw(text, step, options), sharding), metrics)
            metrics, means = get_metrics(metrics)
            yield bits * means["loss_mean"], (time.perf_counter() - begin) / steps_per_row
        metrics = trainer.init_eval_metrics()
        for seed in range(VALIDATION_BATCHES):
            metrics = trainer.eval_step(state, jax.device_put(draw(unseen, seed, options), sharding), metrics)
        yield bits * get_metrics(metrics)[1]["loss"], math.nan


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
    parser.add_argument("--remat", default="none", choices=["none", "norms", "dots", "full"])
    options = parser.parse_args()
    if options.rows < 1 or options.steps < 1 or options.steps % options.rows:
        parser.error(f"{options.steps} steps do not make {options.rows} rows: steps must be a multiple of rows")
    rest = {"backend": "auto", "chunk_size": 64, "unrolled": False}
    rest |= {"head_dtype": "bfloat16", "loss_chunk_size": 8192, "keep_logits": False}
    curves = [train(argparse.Namespace(**vars(options), **rest, float8=float8)) for float8 in (False, True)]
    header = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {vars(options)}\n\n"
    header += (
        "| step | bfloat16 | float8 | difference | ms of a step in bfloat16 | in float8 |\n|---|---|---|---|---|---|"
    )
    steps = [str((i + 1) * (options.steps // options.rows)) for i in range(options.rows)]
    for step, (a, seconds), (b, others) in zip([*steps, "unseen"], *curves, strict=True):
        if step == steps[0]:  # only now are the trainers done with what they have to say
            print(header)
        times = f"{1e3 * seconds:.1f} | {1e3 * others:.1f}" if step != "unseen" else " | "
        print(f"| {step} | {a:.4f} | {b:.4f} | {b / a - 1:+.2%} | {times} |", flush=True)


if __name__ == "__main__":
    main()
