"""A trainer takes states, positions of data, or all of itself from checkpoints."""

import jax
import numpy as np
import pytest
from meshes import make_mesh, unboxed_tree
from trainer.runs import SGD, SizedTokenLoader, TokenLoader, make_trainer, model_config, whole_state

from xlstm_jax.trainer.base.guard import BadStepConfig
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.callbacks.ema import ParameterEMAConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer

pytestmark = pytest.mark.slow

EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train for four steps with a checkpoint after every second: the folder, and the state after the last."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(
        path=folder, callbacks=[ModelCheckpointConfig(every_n_steps=2, max_to_keep=None), ParameterEMAConfig(decay=0.5)]
    )
    val_loader = SizedTokenLoader(trainer.mesh, seed=1, num_batches=2)
    trainer.train_model(TokenLoader(trainer.mesh), val_loader, num_train_steps=4)
    return folder, whole_state(trainer), unboxed_tree(trainer.callbacks[1].params)


def assert_equal(actual, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def test_a_trainer_is_built_from_a_checkpoint_alone(run):
    folder, state, _ = run
    trainer = LLMTrainer.load_from_checkpoint(folder)
    assert_equal(whole_state(trainer), state)
    assert trainer.global_step == 4
    batch = next(TokenLoader(trainer.mesh))
    assert float(trainer.eval_step(trainer.state, batch, None)["loss"]["mean_nopostfix"]["value"]) > 0


def test_a_trainer_is_built_from_a_checkpoint_of_a_run_that_could_roll_back(tmp_path):
    trainer = make_trainer(
        path=tmp_path, bad_steps=BadStepConfig(policy="rollback"), callbacks=[ModelCheckpointConfig(every_n_steps=1)]
    )
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=1)
    assert_equal(whole_state(LLMTrainer.load_from_checkpoint(tmp_path)), whole_state(trainer))


def test_the_last_validation_of_a_run_is_made_up_for(tmp_path):
    class StoppedError(Exception):
        pass

    def build():
        trainer = make_trainer(path=tmp_path, callbacks=[ModelCheckpointConfig()], check_val_every_n_epoch=1)
        return trainer, TokenLoader(trainer.mesh), SizedTokenLoader(trainer.mesh, seed=1, num_batches=1)

    def interrupt(epoch_idx, step_idx):
        if step_idx == 3:
            raise StoppedError

    trainer, train_loader, val_loader = build()
    trainer.callbacks[0].on_validation_epoch_end = lambda metrics, epoch_idx, step_idx: interrupt(epoch_idx, step_idx)
    with pytest.raises(StoppedError):
        trainer.train_model(train_loader, val_loader, num_train_steps=3, steps_per_epoch=2)
    trainer, train_loader, val_loader = build()
    trainer.load_model()
    trainer.load_data_loaders(train_loader=train_loader)
    results = trainer.train_model(train_loader, val_loader, num_train_steps=3, steps_per_epoch=2)
    assert list(results) == ["val_epoch_2"]
    assert trainer.callbacks[0].has_metrics(3)


def test_a_checkpoint_that_was_written_after_a_validation_resumes_with_the_next_one(tmp_path):
    def resume(num_train_steps):
        callbacks = [ModelCheckpointConfig(every_n_epochs=-1)]
        trainer = make_trainer(
            path=tmp_path, callbacks=callbacks, check_val_every_n_steps=1, check_val_every_n_epoch=-1
        )
        train_loader, val_loader = TokenLoader(trainer.mesh), TokenLoader(trainer.mesh, seed=1, num_batches=1)
        trainer.load_model(raise_if_not_found=False)
        if trainer.global_step:
            trainer.load_data_loaders(train_loader=train_loader, val_loader=val_loader)
        return trainer.train_model(train_loader, val_loader, num_train_steps=num_train_steps), val_loader.index

    first, num_drawn = resume(1)
    assert list(first) == ["val_step_1"]
    assert num_drawn == 1
    second, num_drawn = resume(2)
    assert list(second) == ["val_step_2"]
    assert num_drawn == 2


def test_a_trainer_is_built_on_another_mesh(run):
    folder, state, _ = run
    trainer = LLMTrainer.load_from_checkpoint(folder, mesh=make_mesh(**EIGHT))
    assert_equal(whole_state(trainer), state)
    assert trainer.mesh.size == 8


def test_a_checkpoint_is_written_again_after_another_state_was_loaded(tmp_path):
    trainer = make_trainer(path=tmp_path, callbacks=[ModelCheckpointConfig(every_n_steps=1, max_to_keep=None)])
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=2)
    trainer.load_pretrained_model(tmp_path, step_idx=1)
    trainer.train_model(TokenLoader(trainer.mesh, seed=5), num_train_steps=2)
    expected = whole_state(trainer)
    trainer.load_model(2)
    assert_equal(whole_state(trainer), expected)


def test_another_run_goes_on_from_a_checkpoint(run):
    folder, state, _ = run
    trainer = make_trainer(logger=None)
    loader = TokenLoader(trainer.mesh)
    assert trainer.load_pretrained_model(folder, train_loader=loader) == 4
    assert_equal(whole_state(trainer), state)
    assert loader.index == 4
    assert trainer.progress.tokens_seen > 0


def test_a_step_can_be_chosen(run):
    folder, state, _ = run
    trainer = make_trainer(logger=None)
    loader = TokenLoader(trainer.mesh)
    assert trainer.load_pretrained_model(folder, step_idx=2, train_loader=loader) == 2
    trainer.train_model(loader, num_train_steps=4)
    assert_equal(whole_state(trainer), state)


def test_a_new_run_starts_from_the_parameters_alone(run):
    folder, state, _ = run
    trainer = make_trainer(EIGHT, logger=None, optimizer=SGD)
    assert trainer.load_pretrained_model(folder, load_optimizer=False) == 4
    assert (trainer.global_step, int(trainer.state.step), trainer.progress.tokens_seen) == (0, 0, 0)
    assert_equal(whole_state(trainer), params_of(state))


def params_of(state):
    return {name: value for name, value in state.items() if name.startswith("['params']")}


def test_an_average_of_parameters_goes_on(run):
    folder, _, average = run
    trainer = make_trainer(
        EIGHT, path=folder, callbacks=[ModelCheckpointConfig(max_to_keep=None), ParameterEMAConfig(decay=0.5)]
    )
    trainer.load_model()
    jax.tree.map(np.testing.assert_array_equal, unboxed_tree(trainer.callbacks[1].params), average)


def test_a_checkpoint_of_another_model_is_refused(run):
    folder, _, _ = run
    trainer = make_trainer(logger=None, model=model_config(embedding_dim=32))
    with pytest.raises(ValueError, match=r"of another shape.*instead of.*They are of another model: build"):
        trainer.load_pretrained_model(folder)


def test_a_run_with_another_model_does_not_go_on(run):
    folder, _, _ = run
    trainer = make_trainer(path=folder, model=model_config(num_blocks=4), callbacks=[ModelCheckpointConfig()])
    with pytest.raises(ValueError, match=r"num_blocks: 2 → 4.*load_optimizer=False"):
        trainer.load_model()


def test_a_state_needs_parameters():
    with pytest.raises(ValueError, match="needs 'params', but has only: step"):
        make_trainer(logger=None).restore_model({"step": 3})


def test_arrays_of_the_host_take_the_place_of_those_of_the_mesh():
    source, target = make_trainer(logger=None, seed=1), make_trainer(EIGHT, logger=None)
    target.restore_model({"params": unboxed_tree(source.state.params), "step": np.int32(7)})
    assert target.global_step == 7
    assert_equal(params_of(whole_state(target)), params_of(whole_state(source)))
    batch = next(TokenLoader(target.mesh))
    target.train_step(target.state, batch, target.init_train_metrics())


def test_loaders_that_cannot_be_set_are_named(caplog):
    trainer = make_trainer(logger=None)
    trainer.restore_data_loaders({"val_a": {}}, train_loader=TokenLoader(trainer.mesh), val_loader={"a": [1]})
    assert "no state of the loader 'train'" in caplog.text
    assert "'val_a' has no `set_state`" in caplog.text


def test_a_trainer_without_checkpoints_says_so():
    trainer = make_trainer(logger=None)
    trainer.load_model(raise_if_not_found=False)
    for load in (trainer.load_model, trainer.load_data_loaders):
        with pytest.raises(ValueError, match="saves no checkpoints: add a ModelCheckpointConfig"):
            load()


def test_restarts_and_what_they_lost_are_counted(run, tmp_path):
    folder, _, _ = run
    trainer = make_trainer(path=folder, callbacks=[ModelCheckpointConfig(max_to_keep=None)])
    saved = trainer.callbacks[0].load_model()["run"]
    trainer.heartbeat.path.write_text('{"step": 9, "elapsed": %f}' % (sum(saved["seconds"].values()) + 40))
    trainer.load_model()
    assert trainer.clock.seconds["restart"] >= 40
    assert trainer.clock.seconds["compile"] == saved["seconds"]["compile"]
