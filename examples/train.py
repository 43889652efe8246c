"""Train an xLSTM on the Python standard library, byte by byte; stop it at any time and start it again.

    python examples/train.py [--folder outputs/example] [--steps 400]

Shows what a run of one's own needs: configs of data, model, optimizer and run; a trainer; callbacks. Ctrl-C finishes
the step, saves and leaves; the same command goes on from there, and gives what one uninterrupted run would have given.
Nothing is downloaded; two CPU cores need a few minutes.
"""

import argparse
import math
from pathlib import Path

from jax.sharding import Mesh

from xlstm_jax.dataset import DataIterator, LLMBatch, StandardLibraryDataConfig, create_data_iterator
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
from xlstm_jax.trainer.logger import LoggerConfig
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

ROWS, LENGTH = 16, 256


def load_data(mesh: Mesh) -> tuple[DataIterator, DataIterator]:
    """Open the data to train on, and some to validate on: every byte is a token."""
    train, validation = StandardLibraryDataConfig.create_train_eval_configs(
        train_kwargs={"packing": "stream"},
        eval_kwargs={"packing": "first_fit", "max_steps_per_epoch": 8},
        global_batch_size=ROWS,
        max_target_length=LENGTH,
        worker_count=0,
    )
    return create_data_iterator(train, mesh), create_data_iterator(validation, mesh)


def build_trainer(folder: Path, num_steps: int) -> LLMTrainer:
    """Describe the run."""
    parallel = ParallelConfig()
    shape = XLSTMConfig(vocab_size=264, embedding_dim=128, num_heads=4, num_blocks=3, parallel=parallel)
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
                name="cosine_decay", lr=4e-3, warmup_steps=num_steps // 20, decay_steps=num_steps, end_lr_factor=0.1
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
    train_loader, val_loader = load_data(trainer.mesh)
    trainer.load_model(raise_if_not_found=False)
    if trainer.global_step:
        trainer.load_data_loaders(train_loader=train_loader, val_loader=val_loader)
        print(f"Going on from step {trainer.global_step}.")
    results = trainer.train_model(train_loader, val_loader, num_train_steps=options.steps)
    if results:
        loss = list(results.values())[-1]["loss"]
        print(f"Validation: {loss / math.log(2):.2f} bits per byte. The run is in {options.folder}.")


if __name__ == "__main__":
    main()
