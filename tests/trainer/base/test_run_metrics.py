"""The numbers that a run logs about itself, by a clock that passes when it is told to."""

import json

import pytest
from trainer.runs import LENGTH, ROWS, SizedTokenLoader, TokenLoader, make_trainer, model_config

from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.models.cost import model_cost
from xlstm_jax.trainer.base import run_metrics, training_program
from xlstm_jax.trainer.base.run_metrics import mfu_flops
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.run.clock import Clock

STEP, SAVE, VALIDATION = 1.0, 100.0, 50.0
PEAK = 1e9


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of a run that logs each second step, saves every third and validates every fourth."""
    now = [0.0]

    def passes(seconds):
        def transform(batch, index):
            now[0] += seconds
            return batch

        return transform

    save = CheckpointStore.save

    def slow_save(*args):
        now[0] += SAVE
        return save(*args)

    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_program, "Clock", lambda: Clock(now=lambda: now[0]))
        patch.setattr(CheckpointStore, "save", slow_save)
        patch.setattr(run_metrics, "peak_flops", lambda num_devices: PEAK)
        callbacks = [ModelCheckpointConfig(every_n_steps=3, every_n_epochs=-1)]
        trainer = make_trainer(path=folder, callbacks=callbacks, log_every_n_steps=2, check_val_every_n_steps=4)
        validation = SizedTokenLoader(trainer.mesh, num_batches=1, transform=passes(VALIDATION))
        training = TokenLoader(trainer.mesh, transform=passes(STEP))
        trainer.train_model(training, validation, num_train_steps=8)
    lines = (folder / "file_logs/metrics_train.jsonl").read_text().splitlines()
    return {row["log_step"]: row for row in map(json.loads, lines) if "loss_mean" in row}


def test_the_time_of_a_step_leaves_out_checkpoints_and_validations(rows):
    assert [row["step_time"] for row in rows.values()] == [STEP] * 4


def test_throughput_leaves_out_checkpoints_and_validations(rows):
    assert {row["tokens_per_second"] for row in rows.values()} == {ROWS * LENGTH / STEP}


def test_checkpoints_are_reported_with_the_row_after_them(rows):
    assert {step: row["checkpoint_time"] for step, row in rows.items()} == {2: 0, 4: SAVE, 6: SAVE, 8: 0}


def test_validations_are_reported_with_the_row_after_them(rows):
    assert {step: row["evaluation_time"] for step, row in rows.items()} == {2: 0, 4: 0, 6: VALIDATION, 8: 0}


def test_utilisation_is_logged_by_both_definitions_and_leaves_out_checkpoints_and_validations(rows):
    shape = model_config().model_config
    cost = model_cost(shape, sequence_length=LENGTH)
    expected = {"mfu": cost.flops_per_token.model, "mfu_6n": 6 * cost.parameters}
    assert mfu_flops(shape, LENGTH) == expected
    for row in rows.values():
        assert {name: row[name] for name in expected} == pytest.approx(
            {name: flops * ROWS * LENGTH / STEP / PEAK for name, flops in expected.items()}
        )


def test_a_model_that_is_not_ours_has_no_utilisation():
    assert mfu_flops(object(), LENGTH) == {}
