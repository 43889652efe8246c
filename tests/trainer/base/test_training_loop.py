"""Epochs, steps, validations and hooks follow each other as documented."""

import dataclasses

import pytest
from trainer.base.user_trainer import REGRESSION_BATCHES, make_regression
from trainer.runs import (
    SizedTokenLoader,
    TokenLoader,
    make_trainer,
)

from xlstm_jax.trainer.callbacks import Callback, CallbackConfig, ModelCheckpointConfig
from xlstm_jax.trainer.logger import LoggerConfig

pytestmark = pytest.mark.slow


@dataclasses.dataclass(kw_only=True, frozen=False)
class RecorderConfig(CallbackConfig):
    """Makes a recorder."""

    def create(self, trainer, data_module=None):
        return Recorder(self, trainer, data_module)


class Recorder(Callback):
    """Writes down which hook was called with which indices."""

    def __init__(self, config, trainer, data_module=None):
        super().__init__(config, trainer, data_module)
        self.calls = []

    def on_training_start(self):
        self.calls.append("training starts")

    def on_training_end(self):
        self.calls.append("training ends")

    def on_training_epoch_start(self, epoch_idx):
        self.calls.append(f"epoch {epoch_idx} starts")

    def on_training_epoch_end(self, train_metrics, epoch_idx):
        self.calls.append(f"epoch {epoch_idx} ends")
        assert "epoch_time" in train_metrics

    def on_training_step(self, step_metrics, epoch_idx, step_idx):
        self.calls.append(f"step {step_idx} of epoch {epoch_idx}")

    def on_validation_epoch_start(self, epoch_idx, step_idx):
        self.calls.append(f"validation at step {step_idx} of epoch {epoch_idx} starts")

    def on_validation_epoch_end(self, eval_metrics, epoch_idx, step_idx):
        self.calls.append(f"validation at step {step_idx} of epoch {epoch_idx} ends with {sorted(eval_metrics)}")

    def on_test_epoch_start(self, epoch_idx):
        self.calls.append(f"test of epoch {epoch_idx} starts")

    def on_test_epoch_end(self, test_metrics, epoch_idx):
        self.calls.append(f"test of epoch {epoch_idx} ends")

    def set_dataset(self, data_module):
        super().set_dataset(data_module)
        self.calls.append("data are known")

    def finalize(self, status=None):
        self.calls.append(f"finalized with {status}")


def test_hooks_are_called_in_the_documented_order():
    trainer = make_trainer(callbacks=[RecorderConfig()], check_val_every_n_steps=2)
    mesh = trainer.mesh
    val_loader = SizedTokenLoader(mesh, seed=1, num_batches=2)
    results = trainer.train_model(
        TokenLoader(mesh, num_batches=2), val_loader, val_loader, num_epochs=2, steps_per_epoch=2
    )
    names = ["accuracy", "epoch_time", "loss", "perplexity"]
    assert trainer.callbacks[0].calls == [
        "training starts",
        "data are known",
        "epoch 1 starts",
        "step 1 of epoch 1",
        "step 2 of epoch 1",
        "validation at step 2 of epoch 1 starts",
        f"validation at step 2 of epoch 1 ends with {names}",
        "epoch 1 ends",
        "epoch 2 starts",
        "step 3 of epoch 2",
        "step 4 of epoch 2",
        "validation at step 4 of epoch 2 starts",
        f"validation at step 4 of epoch 2 ends with {names}",
        "epoch 2 ends",
        "training ends",
        "test of epoch 2 starts",
        "test of epoch 2 ends",
        "finalized with success",
    ]
    assert list(results) == ["val_step_2", "val_epoch_1", "val_step_4", "val_epoch_2", "test"]
    assert results["val_epoch_2"] is results["val_step_4"]
    assert results["test"]["loss"] == results["val_step_4"]["loss"]


def test_epochs_shorter_than_the_data_go_through_all_of_them():
    trainer = make_regression()
    seen = []
    trainer.on_training_step = lambda metrics, epoch, step: seen.append((epoch, float(drawn[-1])))
    drawn = []

    class Loader(list):
        def __iter__(self):
            for batch in super().__iter__():
                drawn.append(batch.targets[0, 0])
                yield batch

    trainer.train_model(Loader(REGRESSION_BATCHES), num_train_steps=6, steps_per_epoch=2)
    assert seen == [(1, 0.0), (1, 1.0), (2, 2.0), (2, 0.0), (3, 1.0), (3, 2.0)]


class RollingLoader(TokenLoader):
    """Begins anew after it has reported its end."""

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.in_epoch = 0
            raise


class SizedRollingLoader(RollingLoader):
    """One that says how long an epoch is."""

    def __len__(self):
        return self.num_batches


def hooks_of_a_run(path, loader_class, num_train_steps):
    """Train from the last checkpoint up to a step, in epochs of two batches, and return the calls of hooks."""
    callbacks = [ModelCheckpointConfig(every_n_steps=1), RecorderConfig()]
    trainer = make_trainer(path=path, callbacks=callbacks)
    loader, val_loader = loader_class(trainer.mesh, num_batches=2), TokenLoader(trainer.mesh, seed=1, num_batches=1)
    trainer.load_model(raise_if_not_found=False)
    if trainer.global_step:
        trainer.load_data_loaders(train_loader=loader, val_loader=val_loader)
    trainer.train_model(loader, val_loader, num_train_steps=num_train_steps)
    return [call for call in trainer.callbacks[1].calls if call.startswith(("epoch", "step", "validation"))]


def test_a_run_that_resumes_at_the_end_of_an_epoch_calls_the_hooks_of_one_that_was_not_stopped(tmp_path):
    whole, split = tmp_path / "whole", tmp_path / "split"
    resumed = hooks_of_a_run(split, SizedRollingLoader, 2) + hooks_of_a_run(split, SizedRollingLoader, 4)
    assert resumed == hooks_of_a_run(whole, SizedRollingLoader, 4)


def test_an_epoch_of_unknown_length_is_not_validated_again_when_a_run_resumes_at_its_end(tmp_path):
    calls = hooks_of_a_run(tmp_path, RollingLoader, 2) + hooks_of_a_run(tmp_path, RollingLoader, 4)
    starts = [call for call in calls if call.startswith("validation") and call.endswith("starts")]
    assert [start.split()[3] for start in starts] == ["2", "4"]


def test_a_step_is_validated_once():
    trainer = make_trainer(
        path=None,
        logger=LoggerConfig(),
        check_val_every_n_steps=2,
        callbacks=[RecorderConfig()],
    )
    val_loader = SizedTokenLoader(trainer.mesh, seed=1, num_batches=1)
    loader = TokenLoader(trainer.mesh)
    trainer.train_model(loader, val_loader, num_train_steps=2)
    trainer.train_model(loader, val_loader, num_train_steps=3)
    starts = [call for call in trainer.callbacks[0].calls if call.startswith("validation") and call.endswith("starts")]
    assert [start.split()[3] for start in starts] == ["2", "3"]


@pytest.mark.parametrize(
    ("every", "validated"), [({"check_val_every_n_steps": 2}, ["2", "3"]), ({"check_val_every_n_epoch": 2}, ["3"])]
)
def test_a_run_is_validated_after_its_last_step(every, validated):
    settings = {"check_val_every_n_epoch": -1, "check_val_at_end": True, **every}
    trainer = make_trainer(path=None, logger=LoggerConfig(), callbacks=[RecorderConfig()], **settings)
    val_loader = SizedTokenLoader(trainer.mesh, seed=1, num_batches=1)
    trainer.train_model(TokenLoader(trainer.mesh), val_loader, num_train_steps=3)
    starts = [call for call in trainer.callbacks[0].calls if call.startswith("validation") and call.endswith("starts")]
    assert [start.split()[3] for start in starts] == validated


def test_a_run_without_validations_has_none_at_its_end():
    trainer = make_trainer(check_val_every_n_epoch=-1, check_val_at_end=True, logger=None)
    val_loader = SizedTokenLoader(trainer.mesh, seed=1, num_batches=1)
    assert trainer.train_model(TokenLoader(trainer.mesh), val_loader, num_train_steps=1) == {}


def test_a_callback_can_end_a_run():
    trainer = make_trainer(callbacks=[RecorderConfig()], logger=None)
    trainer.callbacks[0].on_training_step = lambda metrics, epoch, step: setattr(trainer, "should_stop", step == 3)
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=10)
    assert trainer.global_step == 3
    assert trainer.callbacks[0].calls[-2:] == ["training ends", "finalized with success"]


def test_an_error_in_a_callback_is_passed_on_after_finalizing():
    trainer = make_trainer(callbacks=[RecorderConfig()], logger=None)

    def fail(metrics, epoch, step):
        raise RuntimeError("broken")

    trainer.callbacks[0].on_training_step = fail
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=10)
    assert trainer.callbacks[0].calls[-1] == "finalized with error"
