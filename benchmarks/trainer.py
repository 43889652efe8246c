"""What the trainer's loop costs beside its compiled step, with its default logging to files and console.

    python benchmarks/trainer.py [--rounds 7] [--steps 60]

A round takes the same steps on the same batch, random tokens in packed documents, with the bare compiled step and with
`train_model`. Both take turns in one run, as machines are shared. The models are so small that what the loop costs
shows; `xlstm-jax bench gpu` has the ratio for recipes. What is given is the median over the rounds of the ratio of both
times, with its quartiles. The memory analysis of the compiled step shows whether the state is overwritten in place.
"""

import argparse
import contextlib
import io
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.synthetic_dataloading import draw_packed_batch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig

SHAPES = {
    "0.69 M parameters, 8 × 256 tokens": ({"embedding_dim": 128, "num_heads": 4, "num_blocks": 2}, 8, 256),
    "0.07 M parameters, 4 × 64 tokens": ({"embedding_dim": 32, "num_heads": 2, "num_blocks": 1}, 4, 64),
}

VOCAB_SIZE = 1024


class TimedLoader:
    """Gives one batch again and again, and remembers when."""

    def __init__(self, batch: Any):
        self.batch = batch
        self.times: list[float] = []

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        self.times.append(time.perf_counter())
        return self.batch


def build(shape: dict[str, int], rows: int, length: int, path: pathlib.Path, log_every_n_steps: int) -> LLMTrainer:
    """Make a trainer of a small model on one device."""
    parallel = ParallelConfig()
    return LLMTrainer(
        LLMTrainerConfig(logger=LoggerConfig(log_path=path, log_every_n_steps=log_every_n_steps)),
        ModelConfig(
            model_class=XLSTM,
            parallel=parallel,
            model_config=XLSTMConfig(vocab_size=VOCAB_SIZE, parallel=parallel, **shape),
        ),
        OptimizerConfig(name="adamw", grad_clip_norm=1.0),
        LLMBatch.get_dtype_struct(rows, length),
        mesh=Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), ("dp", "fsdp", "pp", "tp")),
    )


def time_bare(trainer: LLMTrainer, batch: LLMBatch, num_steps: int) -> float:
    """Take steps and wait for the last: the time of one."""
    state, metrics = trainer.state, trainer.init_train_metrics(batch)
    for index in range(num_steps + 1):
        state, metrics = trainer.train_step(state, batch, metrics)
        if not index:
            jax.block_until_ready(state)
            start = time.perf_counter()
    jax.block_until_ready(state)
    trainer.state = state
    return (time.perf_counter() - start) / num_steps


def time_trainer(trainer: LLMTrainer, batch: LLMBatch, num_steps: int) -> float:
    """Train for as many steps: the time from one batch to the next."""
    loader = TimedLoader(batch)
    trainer.train_model(loader, num_train_steps=int(trainer.state.step) + num_steps + 2)
    return (loader.times[-1] - loader.times[1]) / num_steps


def measure(name: str, shape: dict[str, int], rows: int, length: int, options: argparse.Namespace) -> None:
    """Print one row for each interval of logging."""
    for log_every_n_steps in (1, 10):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = build(shape, rows, length, pathlib.Path(folder), log_every_n_steps)
            sharding = NamedSharding(trainer.mesh, trainer.batch_partition_specs)
            tokens = draw_packed_batch(
                0, batch_size=rows, length=length, vocab_size=VOCAB_SIZE, mean_document_length=length // 2
            )
            batch = jax.device_put(tokens, sharding)
            times = [
                (time_bare(trainer, batch, options.steps), time_trainer(trainer, batch, options.steps))
                for _ in range(options.rounds)
            ]
            arguments = trainer.state, batch, trainer.init_train_metrics()
            memory = trainer.train_step.lower(*arguments).compile().memory_analysis()
            num_programs = trainer.train_step._cache_size()
        bare, whole = np.transpose(times)
        low, ratio, high = np.quantile(whole / bare, (0.25, 0.5, 0.75))
        state_bytes = sum(x.nbytes for x in jax.tree.leaves(trainer.state))
        copied = (memory.output_size_in_bytes - memory.alias_size_in_bytes) / state_bytes
        print(
            f"| {name} | {log_every_n_steps} | {1e3 * np.median(bare):.2f} | {ratio:.3f} ({low:.3f} to {high:.3f}) | "
            f"{num_programs} | {copied:.1%} |",
            flush=True,
        )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Time the trainer beside its compiled step.")
    parser.add_argument("--rounds", type=int, default=7, help="how often both take turns")
    parser.add_argument("--steps", type=int, default=60, help="steps of a round")
    options = parser.parse_args()
    print("| model and batch | logs every n steps | step, ms | trainer / step | programs | state not in place |")
    print("|---|---|---|---|---|---|")
    for name, (shape, rows, length) in SHAPES.items():
        measure(name, shape, rows, length, options)


if __name__ == "__main__":
    main()
