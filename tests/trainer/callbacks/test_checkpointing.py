"""When a run is saved, what it takes to go on, and what is refused."""

import contextlib
import dataclasses
import json
import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from xlstm_jax.checkpoint.store import CheckpointNotFoundError
from xlstm_jax.common_types import TrainState
from xlstm_jax.configs import MAY_CHANGE, ConfigDict, ConfigError
from xlstm_jax.trainer.callbacks import Callback, CallbackConfig, ModelCheckpointConfig, load_pretrained_model
from xlstm_jax.trainer.callbacks.checkpointing import check_folders
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.run.saved_run import restore_callbacks

pytestmark = pytest.mark.slow


@dataclasses.dataclass(kw_only=True)
class Settings(ConfigDict):
    """Stands for the configs of a trainer and of a model."""

    seed: int = 0
    width: int = 3
    dtype: str = dataclasses.field(default="float32", metadata=MAY_CHANGE)


class Loader:
    """Yields numbers, and knows where it stands."""

    def __init__(self, position=0):
        self.position = position

    def get_state(self):
        return {"position": self.position}


class Clock:
    """Notes what is measured."""

    def __init__(self):
        self.measured = []

    @contextlib.contextmanager
    def measure(self, activity):
        self.measured.append(activity)
        yield


def make_trainer(log_path, value=1.0, width=3, **model_settings):
    """Build what checkpoints need of a trainer."""
    params = {"kernel": jnp.full((2, width), value)}
    state = TrainState.create(apply_fn=print, params=params, tx=optax.adam(0.1), rng=jax.random.key(0))
    return SimpleNamespace(
        state_is_good=lambda: True,
        state=state.replace(step=jnp.int32(0), mutable_variables={"statistics": {"mean": jnp.float32(value)}}),
        log_path=log_path,
        global_step=0,
        callbacks=[],
        clock=Clock(),
        run_state=dict,
        trainer_config=Settings(),
        model_config=Settings(width=width, **model_settings),
        optimizer_config=OptimizerConfig(name="adam"),
    )


@pytest.fixture
def trainer(tmp_path):
    """A trainer that logs to a folder."""
    return make_trainer(tmp_path)


def checkpoint(trainer, **settings):
    """Build the callback, with data."""
    data_module = DataloaderModule(Loader(), {"short": Loader(7), "long": Loader(8)}, Loader(9))
    return ModelCheckpointConfig(**settings).create(trainer, data_module)


def go_to(trainer, step, value=None):
    """Let the trainer be at a step; its parameters tell which."""
    trainer.global_step = step
    params = {"kernel": jnp.full_like(trainer.state.params["kernel"], step if value is None else value)}
    trainer.state = trainer.state.replace(step=jnp.int32(step), params=params)


def train(trainer, callback, num_steps, start=0):
    """Run the hooks of a training."""
    callback.on_training_start()
    for step in range(start + 1, start + num_steps + 1):
        go_to(trainer, step)
        callback.data_module.train_dataloader.position = step
        callback.on_training_step({}, epoch_idx=1, step_idx=step)
    callback.on_training_end()


def validate(callback, step, epoch=1, **metrics):
    """Run the hooks of a validation."""
    callback.on_validation_epoch_start(epoch_idx=epoch, step_idx=step)
    callback.on_validation_epoch_end(metrics, epoch_idx=epoch, step_idx=step)


def saved_value(callback, step):
    """Return what the parameters of a checkpoint are all equal to."""
    (value,) = set(np.asarray(callback.load_model(step)["params"]["kernel"]).ravel().tolist())
    return value


def test_checkpoints_are_written_every_few_steps_and_at_the_end(trainer):
    callback = checkpoint(trainer, every_n_steps=2, max_to_keep=None)
    train(trainer, callback, 5)
    assert callback.store.steps() == [2, 4, 5]
    assert saved_value(callback, 4) == 4
    callback.finalize("success")


def test_validation_loaders_stand_where_they_stood_before_a_validation_until_its_metrics_are_saved(trainer):
    callback = checkpoint(trainer)
    go_to(trainer, 2)
    callback.on_validation_epoch_start(epoch_idx=1, step_idx=2)
    callback.data_module.val_dataloader["short"].position = 70
    assert callback.load_dataloader(2)["val_short"] == {"position": 7}
    callback.on_validation_epoch_end({"loss": 1.0}, epoch_idx=1, step_idx=2)
    callback.data_module.val_dataloader["short"].position = 71
    positions = callback.load_dataloader(2)
    assert positions["val_short"] == {"position": 70}
    assert positions["train"] == {"position": 0}
    callback.finalize("success")


def test_a_process_that_is_killed_before_the_metrics_are_saved_repeats_the_validation_from_its_beginning(
    trainer, monkeypatch
):
    callback = checkpoint(trainer)
    go_to(trainer, 2)
    callback.on_validation_epoch_start(epoch_idx=1, step_idx=2)
    callback.data_module.val_dataloader["short"].position = 70
    monkeypatch.setattr(callback.store, "save_metrics", print)
    callback.on_validation_epoch_end({"loss": 1.0}, epoch_idx=1, step_idx=2)
    assert not callback.has_metrics(2)
    assert callback.load_dataloader(2)["val_short"] == {"position": 7}
    callback.finalize("success")


def test_the_position_of_a_validation_loader_is_found_in_a_checkpoint_without_one_after_the_validation(trainer):
    callback = checkpoint(trainer)
    go_to(trainer, 2)
    validate(callback, 2, loss=1.0)
    document = callback.store.read_document(2, "data")
    callback.store.save_document(2, "data", {"loaders": document["loaders"]})
    assert callback.load_dataloader(2)["val_short"] == {"position": 7}
    callback.finalize("success")


def test_nothing_is_written_at_the_end_if_not_asked_for(trainer):
    callback = checkpoint(trainer, save_at_end=False)
    train(trainer, callback, 3)
    assert callback.store.steps() == []


def test_checkpoints_are_written_by_time(trainer, monkeypatch):
    callback = checkpoint(trainer, every_n_minutes=1.0, max_to_keep=None, save_at_end=False)
    monkeypatch.setattr(callback._timer, "_now", lambda: 20.0 * trainer.global_step)
    train(trainer, callback, 7)
    assert callback.store.steps() == [3, 6]
    callback.finalize()


def test_a_checkpoint_is_whole_before_the_validation_begins(trainer):
    callback = checkpoint(trainer, monitor="loss")
    go_to(trainer, 3)
    callback.on_validation_epoch_start(epoch_idx=1, step_idx=3)
    go_to(trainer, 3, value=-1)
    assert saved_value(callback, 3) == 3
    callback.on_validation_epoch_end({"loss": 0.5, "note": "x", "curve": np.ones(3)}, epoch_idx=1, step_idx=3)
    assert saved_value(callback, 3) == 3
    assert json.loads((callback.store.path(3) / "metrics" / "metrics").read_text()) == {"loss": 0.5, "note": "x"}
    callback.finalize()


def test_validations_of_other_epochs_are_left_out(trainer):
    callback = checkpoint(trainer, every_n_epochs=2, max_to_keep=None)
    for epoch in (1, 2, 3, 4):
        go_to(trainer, 10 * epoch)
        validate(callback, 10 * epoch, epoch)
    assert callback.store.steps() == [20, 40]
    callback.finalize()


def test_the_best_checkpoint_is_kept_and_found(trainer):
    callback = checkpoint(trainer, monitor="accuracy", mode="max")
    for step, accuracy in [(1, 0.2), (2, 0.9), (3, 0.4), (4, 0.5)]:
        go_to(trainer, step)
        validate(callback, step, accuracy=accuracy)
    assert callback.store.steps() == [2, 4]
    assert callback.resolve_step_idx(-1, load_best=True) == 2
    assert callback.resolve_step_idx(-1, load_best=False) == 4
    callback.finalize()
    _, _, step = load_pretrained_model(trainer.log_path, trainer, load_best=True)
    assert step == 2


def test_a_missing_metric_is_an_error_but_the_state_is_safe(trainer):
    callback = checkpoint(trainer, monitor="loss")
    go_to(trainer, 1)
    with pytest.raises(ConfigError, match=r"'loss' to monitor is not among .*\['accuracy'\]"):
        validate(callback, 1, accuracy=0.3)
    assert callback.store.steps() == [1]
    callback.finalize()


@pytest.mark.parametrize("broken", ["params", "opt_state"])
def test_a_state_with_nan_is_not_written(trainer, caplog, broken):
    callback = checkpoint(trainer)
    train(trainer, callback, 2)
    go_to(trainer, 3)
    damaged = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, getattr(trainer.state, broken))
    trainer.state = trainer.state.replace(**{broken: damaged})
    validate(callback, 3, loss=float("nan"))
    callback.on_training_end()
    assert callback.store.steps() == [2]
    assert "step 3 is not finite" in caplog.text
    callback.finalize("nan")


def test_an_interrupted_run_is_on_disk_before_it_ends(trainer):
    callback = checkpoint(trainer)
    go_to(trainer, 4)
    callback.on_training_interrupted(epoch_idx=1, step_idx=4)
    assert (trainer.log_path / "checkpoints" / "checkpoint_4").is_dir()
    callback.finalize("interrupted")


def test_everything_a_run_needs_comes_back(trainer):
    callback = checkpoint(trainer)
    train(trainer, callback, 3)
    callback.finalize()
    again = make_trainer(trainer.log_path, value=0.0)
    restored = checkpoint(again).load_model()
    assert set(restored) == {"step", "params", "opt_state", "rng", "mutable_variables", "run", "callbacks"}
    for name in ("step", "params", "opt_state", "mutable_variables"):
        jax.tree.map(np.testing.assert_array_equal, restored[name], getattr(trainer.state, name))
    assert jnp.all(restored["rng"] == trainer.state.rng)
    assert checkpoint(again).load_dataloader() == {
        "train": {"position": 3},
        "val_short": {"position": 7},
        "val_long": {"position": 8},
        "test": {"position": 9},
    }


class Average(Callback):
    """Keeps arrays, and a count of validations."""

    def __init__(self, trainer, value=0.0):
        super().__init__(CallbackConfig(), trainer)
        self.mean = jnp.full((2, 3), value)
        self.num_validations = 0

    def on_validation_epoch_end(self, eval_metrics, epoch_idx, step_idx):
        self.num_validations += 1

    def state_dict(self):
        return {"num_validations": self.num_validations}

    def load_state_dict(self, state_dict):
        self.num_validations = state_dict.get("num_validations", -1)

    def arrays(self):
        return {"average": {"kernel": self.mean}}

    def load_arrays(self, arrays):
        self.mean = arrays["average"]["kernel"] if arrays else None


def test_what_callbacks_and_the_trainer_keep_comes_back(trainer):
    callback = checkpoint(trainer)
    trainer.callbacks = [Average(trainer, 5.0), Average(trainer, 6.0), callback]
    trainer.callbacks[1].arrays = dict
    trainer.run_state = lambda: {"tokens_seen": 17}
    go_to(trainer, 3)
    callback.on_validation_epoch_start(epoch_idx=1, step_idx=3)
    for other in trainer.callbacks:
        other.on_validation_epoch_end({"loss": 1.0}, epoch_idx=1, step_idx=3)
    callback.finalize()
    again = make_trainer(trainer.log_path)
    again.callbacks = [Average(again), Average(again), checkpoint(again)]
    restored = again.callbacks[-1].load_model()
    assert restored["run"] == {"tokens_seen": 17}
    restore_callbacks(again.callbacks, restored)
    np.testing.assert_array_equal(again.callbacks[0].mean, np.full((2, 3), 5))
    assert [other.num_validations for other in again.callbacks[:2]] == [1, 1]
    restore_callbacks(again.callbacks, {"params": {}})
    assert (again.callbacks[0].mean, again.callbacks[0].num_validations) == (None, -1)


def test_a_callback_can_be_used_after_it_was_finalized(trainer):
    callback = checkpoint(trainer, max_to_keep=None)
    train(trainer, callback, 2)
    callback.finalize("success")
    assert saved_value(callback, -1) == 2
    train(trainer, callback, 2, start=2)
    callback.finalize("success")
    assert callback.store.steps() == [2, 4]


def test_a_run_that_starts_again_replaces_what_it_finds(trainer):
    callback = checkpoint(trainer)
    train(trainer, callback, 2)
    callback.finalize()
    again = checkpoint(trainer)
    go_to(trainer, 2, value=-5)
    again.on_training_end()
    assert saved_value(again, 2) == -5
    again.finalize()


def test_a_new_run_in_an_old_folder_keeps_what_it_did_not_write(trainer, caplog):
    callback = checkpoint(trainer)
    train(trainer, callback, 8)
    callback.finalize()
    again = checkpoint(trainer, every_n_steps=1)
    train(trainer, again, 3)
    assert again.store.steps() == [3, 8]
    assert "holds checkpoints of an earlier run, of the steps [8]" in caplog.text
    again.finalize()


def test_a_run_that_goes_on_drops_what_it_wrote_before(trainer):
    callback = checkpoint(trainer)
    train(trainer, callback, 2)
    callback.finalize()
    again = checkpoint(trainer)
    again.load_model()
    train(trainer, again, 1, start=2)
    assert again.store.steps() == [3]
    again.finalize()


def test_two_callbacks_do_not_write_into_one_folder(trainer, tmp_path):
    first, second = checkpoint(trainer, every_n_steps=2), checkpoint(trainer, monitor="loss")
    with pytest.raises(ConfigError, match=r"Two ModelCheckpointConfigs write into .*checkpoints: use one"):
        check_folders([first, second])
    check_folders([first, checkpoint(trainer, log_path=tmp_path / "best")])


def test_a_run_that_went_back_saves_its_steps_anew(trainer):
    callback = checkpoint(trainer, max_to_keep=None, every_n_steps=1)
    train(trainer, callback, 3)
    callback.load_model(1)
    go_to(trainer, 2, value=-2)
    callback.on_training_step({}, epoch_idx=1, step_idx=2)
    assert callback.resolve_step_idx(-1, load_best=False) == 2
    assert saved_value(callback, 2) == -2
    callback.finalize()


def test_without_the_state_of_the_optimizer_that_of_the_trainer_stays(trainer, caplog):
    callback = checkpoint(trainer, save_optimizer_state=False, save_dataloader_state=False)
    train(trainer, callback, 1)
    assert "opt_state" not in callback.load_model()
    assert "holds no opt_state" in caplog.text
    assert callback.load_dataloader() == {}
    callback.save_dataloader(1)
    assert callback.load_dataloader()["train"] == {"position": 1}
    callback.finalize()


def test_a_loader_without_state_is_left_out_with_a_warning(trainer, caplog):
    callback = checkpoint(trainer, every_n_steps=1)
    callback.set_dataset(DataloaderModule(Loader(), iter([])))
    train(trainer, callback, 3)
    assert caplog.text.count("'val' has no `get_state`") == 1
    assert set(callback.load_dataloader()) == {"train"}
    callback.finalize()


def test_changed_settings_are_shown(trainer, caplog):
    callback = checkpoint(trainer)
    train(trainer, callback, 1)
    trainer.trainer_config.seed = 5
    trainer.model_config.dtype = "bfloat16"
    with caplog.at_level(logging.INFO):
        callback.load_model()
    assert "trainer.seed: 0 → 5" in caplog.text
    assert "model.dtype: float32 → bfloat16" in caplog.text
    callback.finalize()


def test_a_run_does_not_go_on_with_another_optimizer(trainer):
    callback = checkpoint(trainer)
    train(trainer, callback, 1)
    trainer.optimizer_config = OptimizerConfig(name="lion")
    with pytest.raises(ValueError, match=r"optimizer.name: adam → lion.*load_pretrained_model"):
        callback.load_model()
    callback.finalize()
    state, _, step = load_pretrained_model(trainer.log_path, trainer, load_optimizer=False)
    assert set(state) == {"params", "mutable_variables"}
    assert step == 1


def test_the_parameters_of_another_model_are_refused(trainer, tmp_path):
    callback = checkpoint(trainer)
    train(trainer, callback, 1)
    callback.finalize()
    wider = make_trainer(tmp_path, width=4)
    with pytest.raises(ValueError, match=r"model.width: 3 → 4"):
        checkpoint(wider).load_model()
    with pytest.raises(ValueError, match=r"kernel \[2, 3\] instead of \[2, 4\].*another model"):
        load_pretrained_model(tmp_path, wider)


def test_another_run_is_read_and_left_as_it_is(trainer, tmp_path):
    callback = checkpoint(trainer, max_to_keep=None, every_n_steps=1)
    train(trainer, callback, 3)
    callback.finalize()
    before = sorted(tmp_path.rglob("*"))
    other = make_trainer(None, value=0.0)
    state, data, step = load_pretrained_model(tmp_path, other, step_idx=2, delete_params_before_loading=True)
    assert step == 2
    np.testing.assert_array_equal(state["params"]["kernel"], np.full((2, 3), 2))
    assert data["train"] == {"position": 2}
    assert other.state.params["kernel"].is_deleted()
    assert sorted(tmp_path.rglob("*")) == before
    assert load_pretrained_model(str(tmp_path / "checkpoints"), make_trainer(None))[2] == 3


def test_the_time_of_a_save_is_measured(trainer):
    trainer.clock = Clock()
    callback = checkpoint(trainer)
    train(trainer, callback, 3)
    assert trainer.clock.measured == ["checkpoint"]
    callback.finalize()


def test_a_missing_checkpoint_is_named(trainer):
    callback = checkpoint(trainer)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint in"):
        callback.load_model()
    train(trainer, callback, 2)
    with pytest.raises(CheckpointNotFoundError, match=r"step 9 .*only of the steps \[2\]"):
        callback.load_model(9)
    callback.finalize()


@pytest.mark.parametrize(
    "settings", [{"mode": "best"}, {"max_to_keep": 0}, {"keep_every": -1}, {"every_n_minutes": 0.0}], ids=str
)
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ModelCheckpointConfig(**settings)


def test_a_run_without_a_folder_is_refused():
    with pytest.raises(ConfigError, match="log_path"):
        checkpoint(make_trainer(None))


def test_checkpoints_may_lie_elsewhere_than_the_logs(trainer, tmp_path):
    callback = checkpoint(trainer, log_path=str(tmp_path / "elsewhere"))
    assert str(callback.store.folder) == str(tmp_path / "elsewhere" / "checkpoints")
    assert str(checkpoint(trainer, log_path="gs://bucket/run").store.folder) == "gs://bucket/run/checkpoints"


def test_the_config_goes_through_json():
    config = ModelCheckpointConfig(monitor="loss", log_path="gs://bucket/run", every_n_minutes=5.0)
    assert ConfigDict.from_dict(ModelCheckpointConfig, json.loads(json.dumps(config.to_dict()))) == config
