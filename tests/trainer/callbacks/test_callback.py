"""Hooks run when the config says so."""

import jax
import pytest

from xlstm_jax.trainer.callbacks import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule


class Recorder(Callback):
    """Keeps the calls of its filtered hooks."""

    def __init__(self, **options):
        super().__init__(CallbackConfig(**options), trainer=None)
        self.calls = []

    def on_filtered_training_epoch_start(self, epoch_idx):
        self.calls.append(("epoch start", epoch_idx))

    def on_filtered_training_epoch_end(self, train_metrics, epoch_idx):
        self.calls.append(("epoch end", epoch_idx, train_metrics))

    def on_filtered_training_step(self, step_metrics, epoch_idx, step_idx):
        self.calls.append(("step", epoch_idx, step_idx, step_metrics))

    def on_filtered_validation_epoch_start(self, epoch_idx, step_idx):
        self.calls.append(("validation start", epoch_idx, step_idx))

    def on_filtered_validation_epoch_end(self, eval_metrics, epoch_idx, step_idx):
        self.calls.append(("validation end", epoch_idx, step_idx, eval_metrics))


def run(callback):
    """Two epochs of three steps, with a validation after each."""
    callback.on_training_start()
    for epoch in (1, 2):
        callback.on_training_epoch_start(epoch)
        for step in range(3 * epoch - 2, 3 * epoch + 1):
            callback.on_training_step({"loss": step}, epoch, step)
        callback.on_training_epoch_end({"epoch_time": 1.0}, epoch)
        callback.on_validation_epoch_start(epoch_idx=epoch, step_idx=3 * epoch)
        callback.on_validation_epoch_end({"loss": 0.0}, epoch_idx=epoch, step_idx=3 * epoch)
    callback.on_training_end()
    callback.on_test_epoch_start(2)
    callback.on_test_epoch_end({}, 2)
    callback.finalize("success")
    return callback.calls


def test_hooks_of_epochs_run_every_n_epochs():
    assert run(Recorder(every_n_epochs=2)) == [
        ("epoch start", 2),
        ("epoch end", 2, {"epoch_time": 1.0}),
        ("validation start", 2, 6),
        ("validation end", 2, 6, {"loss": 0.0}),
    ]


def test_the_hook_of_steps_runs_every_n_steps():
    calls = run(Recorder(every_n_epochs=-1, every_n_steps=4))
    assert calls == [("step", 2, 4, {"loss": 4})]


@pytest.mark.parametrize("options", [{"every_n_epochs": -1}, {"every_n_epochs": 0, "every_n_steps": 0}])
def test_hooks_can_be_switched_off(options):
    assert run(Recorder(**options)) == []


@pytest.mark.parametrize(("main_process_only", "num_calls"), [(True, 0), (False, 14)])
def test_other_processes_can_be_left_out(monkeypatch, main_process_only, num_calls):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert len(run(Recorder(every_n_steps=1, main_process_only=main_process_only))) == num_calls


def test_the_data_of_the_run_is_known_once_it_is_set():
    callback, data = Recorder(), DataloaderModule(train_dataloader=iter([]))
    assert callback.data_module is None
    callback.set_dataset(data)
    assert callback.data_module is data


def test_a_callback_keeps_nothing_in_checkpoints_unless_it_says_so():
    callback = Recorder()
    assert (callback.state_dict(), callback.arrays()) == ({}, {})
    callback.load_state_dict({})
    callback.load_arrays({})


def test_a_config_without_a_callback_says_so():
    with pytest.raises(NotImplementedError, match="create"):
        CallbackConfig().create(trainer=None)
