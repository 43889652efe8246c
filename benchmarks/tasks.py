"""What sLSTM and mLSTM can do and cannot: state tracking and associative recall, after the xLSTM paper.

    python benchmarks/tasks.py
    python benchmarks/tasks.py --task parity --pattern 'xLSTM[0:1]' --seeds 0

Trains small models of the paper's two blocks, each alone and both in turn, on parity and on multi-query associative
recall. In a task all models have the same width, depth, optimizer, steps and batches. Parity is trained on lengths up
to 40 and tested up to 256; every position has a target, so a row of 40 bits trains all lengths up to 40, and the
accuracy at position n of a test row is that on sequences of length n. The seed decides parameters and batches; test
rows come from another stream of it. All 18 runs take some half an hour on one CPU core.
"""

import argparse
import dataclasses
import functools
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.common_types import PyTree, TrainState
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.tasks.examples import Task, draw_batch, draw_parity, draw_recall
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer

PATTERNS = ("xLSTM[0:1]", "xLSTM[1:1]", "xLSTM[1:0]")
NUM_BLOCKS, BATCH_SIZE, WARMUP_STEPS, NUM_TEST_ROWS = 2, 64, 40, 256
RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Setup:
    """A task with the budget that every model gets for it."""

    title: str
    task: Task
    vocab_size: int
    embedding_dim: int
    learning_rate: float
    num_steps: int
    train_length: int
    test_length: int
    columns: dict[str, slice]
    """Positions of the test sequences over which the table gives the accuracy."""

    def describe(self) -> str:
        """Say in a sentence what all models have in common."""
        return (
            f"{NUM_BLOCKS} blocks of width {self.embedding_dim}, one head; {self.num_steps} steps of AdamW with "
            f"{BATCH_SIZE} sequences of length {self.train_length}, learning rate {self.learning_rate} with "
            f"{WARMUP_STEPS} steps of warm-up and cosine decay, weight decay 0.1; tested on {NUM_TEST_ROWS} sequences "
            f"of length {self.test_length}."
        )


SETUPS = {
    "parity": Setup(
        title="Parity",
        task=draw_parity,
        vocab_size=2,
        embedding_dim=32,
        learning_rate=0.02,
        num_steps=400,
        train_length=40,
        test_length=256,
        columns={"accuracy, lengths 1 to 40": slice(0, 40), "accuracy, lengths 41 to 256": slice(40, 256)},
    ),
    "recall": Setup(
        title="Multi-query associative recall: 8 pairs of 64 keys and 64 values",
        task=functools.partial(draw_recall, num_pairs=8, num_keys=64, num_values=64),
        vocab_size=1 + 64 + 64,
        embedding_dim=64,
        learning_rate=0.005,
        num_steps=400,
        train_length=48,
        test_length=48,
        columns={"accuracy of the recalled values": slice(None)},
    ),
}

QUICK = {
    "parity": dataclasses.replace(
        SETUPS["parity"],
        learning_rate=0.01,
        num_steps=200,
        train_length=20,
        test_length=80,
        columns={"accuracy, lengths 1 to 20": slice(0, 20), "accuracy, lengths 21 to 80": slice(20, 80)},
    ),
    "recall": dataclasses.replace(
        SETUPS["recall"],
        title="Multi-query associative recall: 4 pairs of 16 keys and 16 values",
        task=functools.partial(draw_recall, num_pairs=4, num_keys=16, num_values=16),
        vocab_size=1 + 16 + 16,
        embedding_dim=32,
        learning_rate=0.01,
        num_steps=200,
        train_length=16,
        test_length=16,
    ),
}
"""Smaller tasks and budgets, which tell the same in half a minute a run."""


def create_state(setup: Setup, pattern: str, seed: int) -> TrainState:
    """Draw the parameters of a model and build its optimizer."""
    config = XLSTMConfig(
        vocab_size=setup.vocab_size,
        embedding_dim=setup.embedding_dim,
        num_heads=1,
        num_blocks=NUM_BLOCKS,
        block_kinds=pattern,
        norm="layernorm",
    )
    schedule = SchedulerConfig(
        name="cosine_decay",
        lr=setup.learning_rate,
        warmup_steps=min(WARMUP_STEPS, setup.num_steps // 2),
        decay_steps=setup.num_steps,
        end_lr_factor=0.01,
    )
    optimizer, _ = build_optimizer(
        OptimizerConfig(
            name="adamw", scheduler=schedule, weight_decay=0.1, weight_decay_include=["kernel"], grad_clip_norm=1.0
        )
    )
    model = XLSTM(config)
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, batch: LLMBatch) -> TrainState:
    """Take one step on the mean loss over all targets of the batch."""

    def mean_loss(params: PyTree) -> jax.Array:
        losses, _ = state.apply_fn({"params": params}, batch.inputs, targets=batch.targets)
        return jnp.mean(losses, where=batch.targets_segmentation > 0)

    return state.apply_gradients(grads=jax.grad(mean_loss)(state.params))


@jax.jit
def find_hits(state: TrainState, batch: LLMBatch) -> jax.Array:
    """Tell for each position whether its target has the largest logit."""
    _, hits = state.apply_fn({"params": state.params}, batch.inputs, targets=batch.targets)
    return hits


def train(setup: Setup, pattern: str, seed: int) -> TrainState:
    """Train a model on fresh batches; the seed decides all."""
    state, generator = create_state(setup, pattern, seed), np.random.default_rng([seed, 0])
    length = setup.train_length
    for _ in range(setup.num_steps):
        batch = draw_batch(setup.task, generator, BATCH_SIZE, min_length=length, max_length=length)
        state = train_step(state, batch)
    return state


def evaluate(setup: Setup, state: TrainState, seed: int) -> list[float]:
    """Return the accuracies that the table shows."""
    generator, length = np.random.default_rng([seed, 1]), setup.test_length
    batch = draw_batch(setup.task, generator, NUM_TEST_ROWS, min_length=length, max_length=length)
    hits, counts = np.asarray(find_hits(state, batch)), batch.targets_segmentation > 0
    return [float(np.mean(hits[:, part], where=counts[:, part])) for part in setup.columns.values()]


def table(setup: Setup, patterns: Sequence[str], seeds: Sequence[int]) -> Iterator[str]:
    """Train and test all models of a task, and yield a line of Markdown as soon as it is known."""
    yield f"\n## {setup.title}\n\n{setup.describe()}\n"
    yield "| model | parameters | seed | " + " | ".join(setup.columns) + " |"
    yield "|---|---|---|" + "---|" * len(setup.columns)
    for pattern in patterns:
        for seed in seeds:
            state = train(setup, pattern, seed)
            num_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
            accuracies = " | ".join(f"{accuracy:.4f}" for accuracy in evaluate(setup, state, seed))
            yield f"| {pattern} | {num_params:,} | {seed} | {accuracies} |"


def main() -> None:
    """Print the tables, and keep them if there is a date for them."""
    parser = argparse.ArgumentParser(
        description="Reproduce the headline results of the xLSTM paper on synthetic tasks."
    )
    parser.add_argument("--task", choices=SETUPS, nargs="+", default=list(SETUPS), help="tasks; all by default")
    parser.add_argument("--pattern", choices=PATTERNS, nargs="+", default=PATTERNS, help="models; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds; 0 1 2 by default")
    parser.add_argument("--steps", type=int, help="training steps, if not those of the task")
    parser.add_argument("--learning-rate", type=float, help="its peak, if not that of the task")
    parser.add_argument("--quick", action="store_true", help="smaller tasks and fewer steps")
    parser.add_argument("--date", help="write the tables to benchmarks/results/<date>-tasks.md")
    args = parser.parse_args()

    start, lines = time.perf_counter(), []
    for name in args.task:
        setup = (QUICK if args.quick else SETUPS)[name]
        setup = dataclasses.replace(
            setup,
            num_steps=args.steps or setup.num_steps,
            learning_rate=args.learning_rate or setup.learning_rate,
        )
        for line in table(setup, args.pattern, args.seeds):
            print(line, flush=True)
            lines.append(line)
    minutes = (time.perf_counter() - start) / 60
    print(f"\n{minutes:.0f} minutes")
    if args.date:
        command = shlex.join(["python", *sys.argv])
        head = f"# The paper's tasks, {args.date}\n\n`{command}`, jax {jax.__version__}, {jax.default_backend()}, "
        text = f"{head}{minutes:.0f} minutes.\n" + "\n".join(lines) + "\n"
        (RESULTS / f"{args.date}-tasks.md").write_text(text)


if __name__ == "__main__":
    main()
