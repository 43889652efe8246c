"""However a run is cut short and resumed, every step has one row."""

import json
import os
import signal

import pytest
from trainer.runs import SizedTokenLoader, TokenLoader, make_trainer

from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.run.signals import TrainingInterrupted

pytestmark = pytest.mark.slow


def rows_of(path, mode="train"):
    return [json.loads(line) for line in (path / f"file_logs/metrics_{mode}.jsonl").read_text().splitlines()]


def steps_of(path, mode="train"):
    """Return the steps of rows that have more than the time of an epoch."""
    return [row["log_step"] for row in rows_of(path, mode) if "loss_mean" in row or "loss" in row]


def fail_at(number):
    """Return a transform that ends a run at a batch, as a kill would."""

    def transform(batch, index):
        if index == number:
            raise RuntimeError("killed")
        return batch

    return transform


def test_rows_from_before_the_first_checkpoint_are_moved_away_when_training_starts_anew(tmp_path):
    trainer = make_trainer(path=tmp_path)
    with pytest.raises(RuntimeError, match="killed"):
        trainer.train_model(TokenLoader(trainer.mesh, transform=fail_at(4)), num_train_steps=5)
    assert steps_of(tmp_path) == [1, 2, 3]
    trainer = make_trainer(path=tmp_path)
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=5)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    moved = (tmp_path / "file_logs/replaced_1/metrics_train.jsonl").read_text().splitlines()
    assert [json.loads(line)["log_step"] for line in moved] == [1, 2, 3]


def test_a_validation_that_is_made_up_for_has_one_row(tmp_path, monkeypatch):
    def start():
        trainer = make_trainer(path=tmp_path, callbacks=[ModelCheckpointConfig()], check_val_every_n_steps=2)
        trainer.load_model(raise_if_not_found=False)
        loader = TokenLoader(trainer.mesh)
        if trainer.global_step:
            trainer.load_data_loaders(train_loader=loader)
        trainer.train_model(loader, SizedTokenLoader(trainer.mesh, seed=1, num_batches=2), num_train_steps=4)

    def kill(*_args, **_options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("xlstm_jax.checkpoint.store.CheckpointStore.save_metrics", kill)
        with pytest.raises(KeyboardInterrupt):
            start()
    assert steps_of(tmp_path, "val") == [2]
    start()
    assert steps_of(tmp_path, "val") == [2, 4]
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_an_interrupted_epoch_has_no_row_of_its_own(tmp_path):
    trainer = make_trainer(path=tmp_path)
    trainer.on_training_step = lambda *_: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(TrainingInterrupted):
        trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=4)
    assert [row["log_step"] for row in rows_of(tmp_path)] == [1]
