"""Tokens/s, utilisation and memory of the bare compiled training step.

    python benchmarks/train_step.py --experiment xlstm_160m batch_size=16 [key=value ...]
    python benchmarks/train_step.py --model 1.4b --batch 8 --remat dots --keep-logits [--float8] [--kernels]

`--experiment` builds what `xlstm-jax train experiment=NAME data=synthetic key=value ...` would train on these devices:
the model, the optimizer and what `performance: auto` chooses. `--model` builds a model of a recipe's size on one
device from flags, with AdamW and clipping, to try settings by hand.

Tokens are random and packed into documents, as `data=synthetic` draws them; several batches on the device take turns.
The step time is the median over groups of consecutive steps, without compilation and without the first step. MFU takes
the FLOPs that the trainer counts (`models/cost.py`); 6N-MFU takes six FLOPs per parameter and token, embedding
included, as many other projects do.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xlstm_jax.cli.shared.gpu_memory import set_memory_fraction
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.synthetic_dataloading import draw_packed_batch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.models.xlstm.config import SIZES
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run import open_run
from xlstm_jax.trainer.base.compiled_step import StepDoesNotFitError, out_of_memory_is_reported
from xlstm_jax.trainer.base.run_metrics import flops_per_token, peak_flops
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.utils.kernel_times import kernel_table, kernel_times

VOCABULARY = {"vocab_size": 50304}
MODELS: dict[str, dict[str, Any]] = {
    **{name.removeprefix("xLSTM-").lower(): VOCABULARY | shape for name, shape in SIZES.items()},
    "160m-ffn2048": VOCABULARY | SIZES["xLSTM-160M"] | {"ffn_dim": 2048},
    "1.4b-4heads": VOCABULARY | SIZES["xLSTM-1.4B"] | {"num_heads": 4},
    "tiny": {"embedding_dim": 128, "num_heads": 2, "num_blocks": 2, "vocab_size": 512},
}
"""Shapes of the recipes, and three others. `160m-ffn2048` has feed-forward layers of 2048 where the recipe has 2112,
`1.4b-4heads` 4 heads of 256/512 where the recipe has 8 of 128/256: results up to 2026-11-16 are for these two."""
SETTINGS = {
    "batch": 2,
    "context": 8192,
    "remat": "dots",
    "backend": "auto",
    "chunk_size": 256,
    "head_dtype": "bfloat16",
    "loss_chunk_size": 8192,
    "keep_logits": False,
    "unrolled": False,
    "float8": False,
}
"""Flags of `--model` with their defaults; an experiment takes key=value instead."""
KINDS = ("packed", "one-document", "zeros")
NUM_BATCHES = 4
GIB = 2**30


def build(options: argparse.Namespace, folder: str, optimizer: OptimizerConfig) -> LLMTrainer:
    """Build a trainer on one device from flags."""
    parallel = ParallelConfig()
    shape = XLSTMConfig(
        parallel=parallel,
        dtype="bfloat16",
        head_dtype=options.head_dtype,
        loss_chunk_size=options.loss_chunk_size,
        remat=options.remat,
        scan_blocks=not options.unrolled,
        mlstm_backend=options.backend,
        **({"chunk_size": options.chunk_size} if options.backend in ("auto", "chunkwise") else {}),
        float8=options.float8,
        keep_logits=options.keep_logits,
        **MODELS[options.model],
    )
    return LLMTrainer(
        LLMTrainerConfig(logger=LoggerConfig(log_path=folder)),
        ModelConfig(model_class=XLSTM, parallel=parallel, model_config=shape),
        optimizer,
        LLMBatch.get_dtype_struct(options.batch, options.context),
        mesh=Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), ("dp", "fsdp", "pp", "tp")),
    )


def draw_batches(kind: str, trainer: LLMTrainer) -> list[LLMBatch]:
    """Draw batches of one kind of tokens, and place them on the devices of a trainer."""
    batch_size, length = trainer.exmp_batch.inputs.shape
    sharding = NamedSharding(trainer.mesh, trainer.batch_partition_specs)
    if kind == "zeros":
        batches = [LLMBatch.get_sample(batch_size, length)]
    else:
        batches = [
            draw_packed_batch(
                (0, index),
                batch_size=batch_size,
                length=length,
                vocab_size=trainer.model_config.model_config.vocab_size,
                mean_document_length=1000 if kind == "packed" else None,
            )
            for index in range(NUM_BATCHES)
        ]
    return [jax.device_put(batch, sharding) for batch in batches]


@dataclasses.dataclass
class Times:
    """Seconds of a step by kind of tokens, and from the start of building the trainer to the end of the first step."""

    step: dict[str, float]
    first: float


def measure(trainer: LLMTrainer, options: argparse.Namespace, begin: float) -> Times:
    """Train for some steps and time them; kinds of tokens take turns."""
    endless = {kind: itertools.cycle(draw_batches(kind, trainer)) for kind in options.tokens}
    seconds: dict[str, list[float]] = {kind: [] for kind in options.tokens}
    state, metrics = trainer.state, trainer.init_train_metrics()
    with out_of_memory_is_reported(trainer.mesh.local_devices[0]):
        state, metrics = trainer.train_step(state, next(endless[options.tokens[0]]), metrics)
        jax.block_until_ready((state, metrics))
        first = time.perf_counter() - begin
        for _ in range(options.groups):
            for kind, batches in endless.items():
                start = time.perf_counter()
                for _ in range(options.steps):
                    state, metrics = trainer.train_step(state, next(batches), metrics)
                jax.block_until_ready((state, metrics))
                seconds[kind].append((time.perf_counter() - start) / options.steps)
    trainer.state = state
    return Times({kind: statistics.median(times) for kind, times in seconds.items()}, first)


def open_and_measure(options: argparse.Namespace, folder: Path) -> tuple[LLMTrainer, Times, dict[str, Any]]:
    """Build the trainer, time its step, and return both with the settings that were chosen."""
    begin = time.perf_counter()
    if not options.experiment:
        trainer = build(options, str(folder), OptimizerConfig(name="adamw", weight_decay=0.1, grad_clip_norm=1.0))
        trainer.compile_train_step()
        return trainer, measure(trainer, options, begin), {"chosen": {}, "reason": "from flags"}
    settings = compose(experiment_words(options))
    while True:
        run = open_run(settings, folder)
        try:
            run.compile()
            times = measure(run.trainer, options, begin)
        except StepDoesNotFitError as error:  # `performance: auto` makes another choice when the run is opened again.
            run.close_without_room(error)
            continue
        run.lock.close()
        return run.trainer, times, {"chosen": run.performance.settings, "reason": run.performance.reason}


def experiment_words(options: argparse.Namespace) -> list[str]:
    """Return the settings that the command line of `xlstm-jax train` would have."""
    return [f"experiment={options.experiment}", "data=synthetic", *options.overrides]


def describe(trainer: LLMTrainer, kind: str, times: Times) -> dict[str, Any]:
    """Return the figures of a row."""
    num_rows, length = trainer.exmp_batch.inputs.shape
    seconds, num_parameters = times.step[kind], trainer.get_num_params()
    rate, peak = num_rows * length / seconds, peak_flops(trainer.mesh.size)
    memory: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    compiled = trainer.compiled_memory
    return {
        "tokens": kind,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "parameters": num_parameters,
        "tokens_per_step": num_rows * length,
        "step_ms": 1e3 * seconds,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token(trainer.model_config.model_config, length) / peak,
        "mfu_6n": rate * 6 * num_parameters / peak,
        "compiled_gib": None if compiled is None else compiled.peak / GIB,
        "peak_gib": memory.get("peak_bytes_in_use", 0) / GIB,
        "first_step_seconds": times.first,
    }


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tokens": lambda row: row["tokens"],
    "parameters": lambda row: f"{row['parameters']:,}",
    "tokens per step": lambda row: f"{row['tokens_per_step']:,}",
    "step, ms": lambda row: f"{row['step_ms']:.1f}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "MFU": lambda row: f"{row['mfu']:.3f}",
    "6N-MFU": lambda row: f"{row['mfu_6n']:.3f}",
    "compiled, GiB": lambda row: "-" if row["compiled_gib"] is None else f"{row['compiled_gib']:.1f}",
    "peak, GiB": lambda row: f"{row['peak_gib']:.1f}",
    "first step, s": lambda row: f"{row['first_step_seconds']:.1f}",
}


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows as a table."""
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in rows:
        print(f"| {' | '.join(cell(row) for cell in COLUMNS.values())} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line; flags of `--model` that are not given get their defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", help="a recipe, as for xlstm-jax train")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the experiment")
    parser.add_argument("--model", choices=MODELS, help="a shape; tiny by default")
    parser.add_argument("--batch", type=int, help="sequences of a step")
    parser.add_argument("--context", type=int, help="tokens of a sequence")
    parser.add_argument("--remat", choices=["none", "norms", "dots", "full"])
    parser.add_argument("--backend", help="the form of the mLSTM")
    parser.add_argument("--chunk-size", type=int, help="positions of a chunk in plain JAX")
    parser.add_argument("--head-dtype", help="precision of the projection to the vocabulary")
    parser.add_argument("--loss-chunk-size", type=int, help="tokens whose logits the loss holds at once")
    parser.add_argument("--keep-logits", action="store_true", default=None, help="save logits for the backward pass")
    parser.add_argument("--unrolled", action="store_true", default=None, help="unrolled blocks instead of a scan")
    parser.add_argument("--float8", action="store_true", default=None, help="projections in float8")
    parser.add_argument(
        "--tokens",
        nargs="+",
        choices=KINDS,
        default=["packed"],
        help="random in packed documents, random in one document per row, or zeros; several kinds take turns",
    )
    parser.add_argument("--groups", type=int, default=5, help="groups of steps that are timed")
    parser.add_argument("--steps", type=int, default=8, help="steps of a group")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step by time, on a GPU")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    options = parser.parse_intermixed_args()
    given = [name for name in ("model", *SETTINGS) if getattr(options, name) is not None]
    if options.experiment and given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        parser.error(f"{flags} cannot change an experiment: use key=value, such as model.remat=dots")
    if options.overrides and not options.experiment:
        parser.error(f"{options.overrides[0]} is a setting of an experiment: add --experiment NAME, or use flags")
    options.model = options.model or "tiny"
    for name, default in SETTINGS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def main() -> None:
    """Print a row."""
    options = parse_arguments()
    set_memory_fraction()
    with tempfile.TemporaryDirectory() as folder:
        trainer, times, performance = open_and_measure(options, Path(folder))
        rows = [describe(trainer, kind, times) for kind in options.tokens]
        what = experiment_words(options) if options.experiment else vars(options)
        print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {what}")
        print(f"Settings: {performance['reason']}\n")
        print_table(rows)
        if options.kernels:
            (batch, *_), metrics = draw_batches(options.tokens[0], trainer), trainer.init_train_metrics()
            print(f"\n{kernel_table(kernel_times(lambda: trainer.train_step(trainer.state, batch, metrics)), 40)}")
    if options.json:
        options.json.write_text(json.dumps(performance | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
