"""One of two processes that train together until one of them gets a signal.

python one_of_two.py INDEX PORT FOLDER [SIGNAL STEP]
"""

import os
import signal
import sys
from pathlib import Path

# Of the flags that the tests compile with, only the number of devices is another one here: the last one counts.
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=2"])

import jax
import numpy as np
from trainer.runs import SizedTokenLoader, TokenLoader, make_trainer, model_config

from xlstm_jax.trainer.callbacks import Callback, CallbackConfig, ModelCheckpointConfig

NUM_STEPS = 8
index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


class Signal(Callback):
    """Sends a signal to the second process."""

    def on_training_step(self, step_metrics, epoch_idx, step_idx):
        if len(sys.argv) > 4 and index == 1 and step_idx == int(sys.argv[5]):
            os.kill(os.getpid(), getattr(signal, sys.argv[4]))


def main():
    """Train, or go on training."""
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
    trainer = make_trainer(
        {"dp": 2, "fsdp": jax.device_count() // 2},
        path=folder,
        model=model_config(num_blocks=1),
        callbacks=[ModelCheckpointConfig()],
        check_val_every_n_steps=4,
    )
    trainer.callbacks.append(Signal(CallbackConfig(), trainer))
    train_loader = TokenLoader(trainer.mesh)
    trainer.load_model(raise_if_not_found=False)
    if trainer.global_step:
        trainer.load_data_loaders(train_loader=train_loader)
    val_loader = SizedTokenLoader(trainer.mesh, seed=1, num_batches=2)
    results = trainer.train_model(train_loader, val_loader, num_train_steps=NUM_STEPS)
    if index == 0:
        np.savez(folder / "results.npz", **{name: metrics["loss"] for name, metrics in results.items()})


if __name__ == "__main__":
    main()
