"""How many tokens a second one device trains, and how near that is to its arithmetic.

    python benchmarks/train_step.py [--model 1.4b] [--batch 8] [--remat dots] [--backend mosaic] [--float8] [--kernels]

Takes the trainer's own compiled step, on random tokens: activations in bfloat16, parameters and AdamW's moments in
float32, gradients clipped. A time is the median over groups of steps one after the other. The share of the peak is
that of six FLOPs for each parameter and token, as peers count it; what is computed again does not count.
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.accelerators import of_device_kind
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.utils.kernel_times import kernel_table, kernel_times

MODELS = {
    "1.4b": {"embedding_dim": 2048, "num_heads": 4, "num_blocks": 24, "vocab_size": 50304},
    "162m": {"embedding_dim": 768, "num_heads": 6, "num_blocks": 12, "vocab_size": 50304, "ffn_dim": 2048},
    "tiny": {"embedding_dim": 128, "num_heads": 2, "num_blocks": 2, "vocab_size": 512},
}
"""The sizes that peers were measured at, and one for a small machine."""
GIB = 2**30


def build(options: argparse.Namespace, folder: str, optimizer: OptimizerConfig) -> LLMTrainer:
    """Make a trainer on one device."""
    parallel = ParallelConfig()
    shape = XLSTMConfig(
        parallel=parallel,
        dtype="bfloat16",
        head_dtype=options.head_dtype,
        loss_chunk_size=options.loss_chunk_size,
        remat=options.remat,
        scan_blocks=not options.unrolled,
        mlstm_backend=options.backend,
        chunk_size=options.chunk_size,
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


def measure(trainer: LLMTrainer, batch: LLMBatch, options: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds of a step and those until the first was done."""
    begin = time.perf_counter()
    state, metrics = trainer.state, trainer.init_train_metrics(batch)
    times = []
    for group in range(options.groups + 1):
        start = time.perf_counter()
        for _ in range(options.steps if group else 1):
            state, metrics = trainer.train_step(state, batch, metrics)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / options.steps if group else time.perf_counter() - begin)
    trainer.state = state
    return statistics.median(times[1:]), times[0]


def main() -> None:
    """Print a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a step")
    parser.add_argument("--context", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--remat", default="dots", choices=["none", "norms", "dots", "full"])
    parser.add_argument("--backend", default="auto", help="the form of the mLSTM")
    parser.add_argument("--chunk-size", type=int, default=256, help="positions of a chunk in plain JAX")
    parser.add_argument("--head-dtype", default="bfloat16", help="precision of the projection to the vocabulary")
    parser.add_argument("--loss-chunk-size", type=int, default=8192, help="tokens whose logits the loss holds at once")
    parser.add_argument("--keep-logits", action="store_true", help="logits are not computed again in the backward pass")
    parser.add_argument("--unrolled", action="store_true", help="blocks one by one, not in a scan")
    parser.add_argument("--float8", action="store_true", help="projections in float8")
    parser.add_argument("--groups", type=int, default=5, help="how often steps are timed")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed together")
    parser.add_argument("--kernels", action="store_true", help="what a step spends its time on, on a GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(options, folder, OptimizerConfig(name="adamw", weight_decay=0.1, grad_clip_norm=1.0))
        sharding = NamedSharding(trainer.mesh, trainer.batch_partition_specs)
        batch = jax.device_put(LLMBatch.get_sample(options.batch, options.context), sharding)
        seconds, first = measure(trainer, batch, options)
        num_parameters = sum(x.size for x in jax.tree.leaves(trainer.state.params))
        tokens = options.batch * options.context
        device = jax.devices()[0]
        accelerator = of_device_kind(device.device_kind)
        peak = accelerator and 6 * num_parameters * tokens / seconds / accelerator.bfloat16_flops
        memory: dict[str, Any] = device.memory_stats() or {}
        print(f"{device.device_kind}, jax {jax.__version__}, {vars(options)}\n")
        print(
            "| parameters | tokens of a step | step, ms | tokens/s | share of the peak | memory, GiB | first step, s |"
        )
        print("|---|---|---|---|---|---|---|")
        share = "-" if peak is None else f"{peak:.3f}"
        figures = f"{1e3 * seconds:.1f} | {tokens / seconds:,.0f} | {share}"
        used = memory.get("peak_bytes_in_use", 0) / GIB
        print(f"| {num_parameters:,} | {tokens:,} | {figures} | {used:.1f} | {first:.1f} |", flush=True)
        if options.kernels:
            metrics = trainer.init_train_metrics(batch)
            print(f"\n{kernel_table(kernel_times(lambda: trainer.train_step(trainer.state, batch, metrics)), 40)}")


if __name__ == "__main__":
    main()
