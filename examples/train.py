"""Train an xLSTM on the Python standard library, byte by byte; stop it at any time and start it again.

    python examples/train.py [--folder outputs/example] [--steps 400]

Shows what a run of one's own needs: batches that know where they are, configs, a trainer, callbacks. Ctrl-C finishes
the step, saves and leaves; the same command goes on from there, and gives what one uninterrupted run would have given.
Nothing is downloaded; two CPU cores need a few minutes.
"""

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.dataset import LLMBatch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger import LoggerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

ROWS, LENGTH = 16, 256
MODULES = ("argparse", "ast", "calendar", "csv", "dataclasses", "difflib", "doctest", "enum", "functools", "inspect")
HELD_OUT = ("heapq", "shlex")


class ByteLoader:
    """Windows of a text in an order that follows from the seed; batch `n` is the same in every run.

    Args:
        text: The text.
        mesh: The devices.
        num_batches: The length of an epoch, after which the order begins anew; `None` for no end.
    """

    def __init__(self, text: bytes, mesh: Mesh, num_batches: int | None = None):
        self.tokens = np.frombuffer(text, np.uint8).astype(np.int32)
        self.sharding = NamedSharding(mesh, P(mesh.axis_names))
        self.num_batches = num_batches
        self.index = 0

    def __iter__(self) -> Iterator[LLMBatch]:
        if self.num_batches is not None:
            self.index = 0
        return self

    def __next__(self) -> LLMBatch:
        if self.index == self.num_batches:
            raise StopIteration
        generator = np.random.default_rng((42, self.index))
        starts = generator.integers(0, len(self.tokens) - LENGTH, ROWS)
        windows = self.tokens[starts[:, None] + np.arange(LENGTH + 1)]
        self.index += 1
        batch = LLMBatch.from_inputs(windows[:, :-1], windows[:, 1:])
        return jax.device_put(batch, self.sharding)

    def get_state(self) -> dict[str, int]:
        """Say where the loader is, for checkpoints."""
        return {"index": self.index}

    def set_state(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.index = state["index"]


def read_modules(names: tuple[str, ...]) -> bytes:
    """Return the source of modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return b"\n".join((folder / f"{name}.py").read_bytes() for name in names)


def build_trainer(folder: Path, num_steps: int) -> LLMTrainer:
    """Describe the run."""
    parallel = ParallelConfig()
    shape = XLSTMConfig(vocab_size=256, embedding_dim=128, num_heads=4, num_blocks=3, parallel=parallel)
    return LLMTrainer(
        LLMTrainerConfig(
            logger=LoggerConfig(log_path=folder, log_every_n_steps=10),
            check_val_every_n_steps=100,
            bytes_per_token=1.0,
            callbacks=[
                ModelCheckpointConfig(monitor="loss", every_n_steps=50, max_to_keep=2),
                TextSamplesConfig(prompts=["def ", "import "], max_length=120, temperature=0.7),
            ],
        ),
        ModelConfig(model_class=XLSTM, parallel=parallel, model_config=shape),
        OptimizerConfig(
            name="adamw",
            scheduler=SchedulerConfig(
                name="cosine_decay", lr=4e-3, warmup_steps=20, decay_steps=num_steps, end_lr_factor=0.1
            ),
            weight_decay=0.1,
            grad_clip_norm=1.0,
        ),
        LLMBatch.get_dtype_struct(ROWS, LENGTH),
    )


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description="Train an xLSTM on the Python standard library.")
    parser.add_argument("--folder", type=Path, default=Path("outputs/example"), help="where the run is kept")
    parser.add_argument("--steps", type=int, default=400, help="how long to train")
    options = parser.parse_args()
    trainer = build_trainer(options.folder, options.steps)
    train_loader = ByteLoader(read_modules(MODULES), trainer.mesh)
    val_loader = ByteLoader(read_modules(HELD_OUT), trainer.mesh, num_batches=8)
    trainer.load_model(raise_if_not_found=False)
    if trainer.global_step:
        trainer.load_data_loaders(train_loader=train_loader)
        print(f"Going on from step {trainer.global_step}.")
    results = trainer.train_model(train_loader, val_loader, num_train_steps=options.steps)
    if results:
        loss = list(results.values())[-1]["loss"]
        print(f"Validation: {loss / math.log(2):.2f} bits per byte. The run is in {options.folder}.")


if __name__ == "__main__":
    main()
