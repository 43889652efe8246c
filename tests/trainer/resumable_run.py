"""A training run in a process of its own, which ends as it is told to and goes on where it ended.

python resumable_run.py FOLDER [--mesh dp8] [--end HOW --at N]
"""

import argparse
import json
import os
import pathlib
import signal
import sys
import threading
import time

import numpy as np
from meshes import make_mesh
from trainer.runs import TokenLoader, make_trainer, whole_state

from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.trainer.callbacks import Callback, CallbackConfig, ModelCheckpointConfig

NUM_STEPS = 14
MESHES = {"one": {}, "dp8": {"dp": 8}, "dp2-fsdp2-tp2": {"dp": 2, "fsdp": 2, "tp": 2}}


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class EndingLoader(TokenLoader):
    """Batches for validation, other ones in each pass, of which one ends the process."""

    end_at = None
    count = 0

    def __next__(self):
        batch = super().__next__()
        EndingLoader.count += 1
        if EndingLoader.count == self.end_at:
            kill()
        return batch


class End(Callback):
    """Ends the run in some way after some step."""

    def __init__(self, how, at, trainer):
        super().__init__(CallbackConfig(), trainer)
        self.how, self.at = how, at

    def on_training_step(self, step_metrics, epoch_idx, step_idx):
        if step_idx != self.at:
            return
        if self.how == "exception":
            raise RuntimeError("This callback is broken.")
        if self.how == "kill":
            kill()
        elif self.how != "validation":
            os.kill(os.getpid(), getattr(signal, self.how))


def kill_during_save(at):
    """End the process while a checkpoint is written: a moment after the `at`-th save has begun."""
    save, count = CheckpointStore.save, [0]

    def slow_save(self, *arguments):
        count[0] += 1
        if count[0] == at // 100:
            threading.Thread(target=lambda: (time.sleep((at % 100) / 1000), kill())).start()
        save(self, *arguments)

    CheckpointStore.save = slow_save


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--mesh", default="one", choices=MESHES)
    parser.add_argument("--end", default="never")
    parser.add_argument("--at", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=1)
    options = parser.parse_args()
    mesh = make_mesh(**MESHES[options.mesh])
    trainer = make_trainer(
        MESHES[options.mesh],
        path=options.folder,
        log_every_n_steps=options.log_every,
        check_val_every_n_steps=4,
        callbacks=[ModelCheckpointConfig(every_n_steps=3, max_to_keep=2, monitor="loss")],
    )
    train_loader, val_loader = TokenLoader(mesh), EndingLoader(mesh, seed=1, num_batches=3)
    if (options.folder / "checkpoints").exists():
        trainer.load_model(raise_if_not_found=False)
        if trainer.global_step:
            trainer.load_data_loaders(train_loader=train_loader, val_loader=val_loader)
    if options.end == "SIGUSR2":  # as submitit does, before the limit of a job
        signal.signal(signal.SIGUSR2, lambda *_: sys.exit(77))
    if options.end == "validation":
        EndingLoader.end_at = options.at
    elif options.end == "save":
        kill_during_save(options.at)
    trainer.callbacks.append(End(options.end, options.at, trainer))
    started_at = trainer.global_step
    trainer.train_model(train_loader, val_loader, num_train_steps=NUM_STEPS)
    np.savez(options.folder / "state.npz", **whole_state(trainer))
    (options.folder / "started_at.json").write_text(json.dumps(started_at))


if __name__ == "__main__":
    main()
