"""Bad steps are recognised on the device, and the run stops, skips or goes back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainer.runs import TokenLoader, losses, make_trainer, whole_state

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.base.guard import BadStepConfig, GuardState, judge
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer

pytestmark = pytest.mark.slow

EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}
BAD_TOKEN = 31


class FragileTrainer(LLMTrainer):
    """A trainer whose loss is NaN on batches of one token, on one device only."""

    spoilt = float("nan")

    def loss_function(self, params, apply_fn, batch, rng, train=True, mutable_variables=None):
        loss, aux = super().loss_function(params, apply_fn, batch, rng, train, mutable_variables)
        is_bad = (batch.inputs == BAD_TOKEN).all() & (jax.lax.axis_index(("dp", "fsdp")) == 0)
        return loss * jax.numpy.where(is_bad & train, self.spoilt, 1.0), aux


class SpikyTrainer(FragileTrainer):
    """A trainer whose loss is many times as large on such batches."""

    spoilt = 1e4


def poison(*indices):
    """Return a transform that fills some batches with one token."""

    def transform(batch, index):
        return dataclasses.replace(batch, inputs=np.full_like(batch.inputs, BAD_TOKEN)) if index in indices else batch

    return transform


def train(trainer, *bad_batches, num_steps=6):
    loader = TokenLoader(trainer.mesh, transform=poison(*bad_batches))
    trainer.train_model(loader, num_train_steps=num_steps)
    return loader


def params_of(trainer):
    return {name: value for name, value in whole_state(trainer).items() if name.startswith("['params']")}


@pytest.mark.parametrize("sizes", [{}, EIGHT], ids=["one device", "dp2-fsdp2-tp2"])
def test_a_run_that_stops_keeps_the_state_before_the_bad_step(sizes):
    trainer = make_trainer(sizes, trainer_class=FragileTrainer, log_every_n_steps=3)
    train(trainer, 4)
    good = make_trainer(sizes, trainer_class=FragileTrainer)
    train(good, num_steps=3)
    assert int(trainer.state.step) == 3
    for name, expected in whole_state(good).items():
        np.testing.assert_array_equal(whole_state(trainer)[name], expected, err_msg=name)


def test_a_run_that_stops_says_so(tmp_path):
    trainer = make_trainer(path=tmp_path, trainer_class=FragileTrainer)
    results = trainer.train_model(TokenLoader(trainer.mesh, transform=poison(4)), num_train_steps=6)
    assert results == {}
    assert "The run ended with status nan." in (tmp_path / "output.log").read_text()
    assert max(losses(tmp_path)) == 4


@pytest.mark.parametrize("sizes", [{}, EIGHT], ids=["one device", "dp2-fsdp2-tp2"])
def test_a_skipped_step_changes_no_parameter_and_the_run_goes_on(sizes, tmp_path):
    skip = BadStepConfig(policy="skip")
    trainer = make_trainer(sizes, path=tmp_path, trainer_class=FragileTrainer, bad_steps=skip)
    states = []
    trainer.on_training_step = lambda *arguments: states.append(params_of(trainer))
    train(trainer, 2, 5)
    for first, second in ((1, 2), (4, 5)):
        for name, expected in states[first - 1].items():
            np.testing.assert_array_equal(states[second - 1][name], expected, err_msg=name)
    assert any((states[2][name] != states[1][name]).any() for name in states[1])
    assert int(trainer.state.step) == 6
    assert int(trainer.state.guard.num_bad) == 2
    assert np.isfinite(list(losses(tmp_path).values())).all()
    assert list(losses(tmp_path, "bad_steps").values()) == [0, 1, 1, 1, 2, 2]


def test_the_step_after_a_skipped_one_draws_other_random_numbers():
    trainer = make_trainer(trainer_class=FragileTrainer, bad_steps=BadStepConfig(policy="skip"), logger=None)
    keys = []
    trainer.on_training_step = lambda *arguments: keys.append(jax.random.key_data(trainer.state.rng).tobytes())
    train(trainer, 2, num_steps=3)
    assert len(set(keys)) == 3


@pytest.mark.parametrize(("share", "status"), [(0.3, "skipped"), (0.4, "success")])
def test_a_run_that_skips_too_large_a_share_of_its_steps_is_no_success(share, status, tmp_path):
    skip = BadStepConfig(policy="skip", max_skipped_share=share)
    trainer = make_trainer(path=tmp_path, trainer_class=FragileTrainer, bad_steps=skip, log_every_n_steps=3)
    train(trainer, 2, 5)
    assert trainer.status == status
    log = (tmp_path / "output.log").read_text()
    assert "1 bad steps were skipped, 2 so far." in log
    assert ("2 of 6 steps were bad and skipped" in log) == (status == "skipped")


def test_a_spike_is_bad_after_the_warm_up():
    options = {"loss_spike_factor": 3.0, "spike_warmup_steps": 3, "policy": "skip"}
    trainer = make_trainer(trainer_class=SpikyTrainer, bad_steps=BadStepConfig(**options), logger=None)
    train(trainer, 2, 5)
    assert int(trainer.state.guard.num_bad) == 1


def test_a_spike_of_the_gradient_is_bad():
    options = {"grad_norm_spike_factor": 10.0, "spike_warmup_steps": 2, "policy": "skip"}
    trainer = make_trainer(trainer_class=SpikyTrainer, bad_steps=BadStepConfig(**options), logger=None)
    train(trainer, 4)
    assert int(trainer.state.guard.num_bad) == 1


@pytest.mark.parametrize("every_n_steps", [1, 4])
def test_a_rollback_gives_the_run_without_the_bad_batch(every_n_steps, tmp_path):
    trainer = make_trainer(
        path=tmp_path / "bad",
        trainer_class=FragileTrainer,
        bad_steps=BadStepConfig(policy="rollback"),
        log_every_n_steps=3,
        callbacks=[ModelCheckpointConfig(every_n_steps=every_n_steps, max_to_keep=None)],
    )
    loader = train(trainer, 5, 7, num_steps=8)
    assert (trainer.progress.num_rollbacks, sorted(trainer.progress.skipped_batches)) == (2, [5, 7])
    assert loader.index == 10

    good = make_trainer(logger=None, trainer_class=FragileTrainer)
    batches = TokenLoader(good.mesh)
    kept = [batch for index, batch in zip(range(1, 11), batches, strict=False) if index not in (5, 7)]
    good.train_model(iter(kept), num_train_steps=8)
    for name, expected in whole_state(good).items():
        np.testing.assert_array_equal(whole_state(trainer)[name], expected, err_msg=name)


def test_epochs_keep_their_length_after_a_rollback(tmp_path):
    trainer = make_trainer(
        path=tmp_path,
        trainer_class=FragileTrainer,
        bad_steps=BadStepConfig(policy="rollback"),
        callbacks=[ModelCheckpointConfig(every_n_steps=1)],
    )
    epochs = []
    trainer.on_training_epoch_end = lambda metrics, epoch: epochs.append((epoch, trainer.progress.num_drawn))
    loader = TokenLoader(trainer.mesh, transform=poison(2))
    trainer.train_model(loader, num_train_steps=8, steps_per_epoch=3)
    assert epochs == [(1, 3), (2, 6), (3, 9)]


def test_a_rollback_needs_a_loader_that_can_go_back(tmp_path):
    trainer = make_trainer(
        path=tmp_path, bad_steps=BadStepConfig(policy="rollback"), callbacks=[ModelCheckpointConfig(every_n_steps=1)]
    )
    with pytest.raises(ValueError, match="needs `get_state` and `set_state`"):
        trainer.train_model([next(TokenLoader(trainer.mesh))], num_epochs=1)


def test_a_rollback_needs_checkpoints_that_say_where_the_data_was(tmp_path):
    checkpoints = ModelCheckpointConfig(every_n_steps=1, save_dataloader_state=False)
    trainer = make_trainer(path=tmp_path, bad_steps=BadStepConfig(policy="rollback"), callbacks=[checkpoints])
    with pytest.raises(ValueError, match="checkpoints need save_dataloader_state"):
        trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=1)


@pytest.mark.parametrize(("loss", "is_bad"), [(-100.0, False), (-90.0, False), (110.0, True)])
def test_a_negative_loss_is_bad_only_where_it_jumps(loss, is_bad):
    config = BadStepConfig(loss_spike_factor=3.0, spike_warmup_steps=2)
    zero = jnp.int32(0)
    guard = GuardState(zero + 10, zero, zero, jnp.float32(-100.0), jnp.float32(1.0))
    given = {"step": zero, "loss": jnp.float32(loss), "grad_norm": jnp.float32(1.0), "axis_names": ("dp",)}
    run = jax.vmap(lambda _: judge(guard, config, **given)[0].is_bad, axis_name="dp")
    assert bool(run(jnp.zeros(1))[0]) == is_bad


@pytest.mark.parametrize(("loss", "average"), [(9.0, 2.0), (float("nan"), 2.0), (4.0, 3.0)])
def test_only_good_steps_count_in_the_averages(loss, average):
    guard = GuardState(jnp.int32(1), jnp.int32(0), jnp.int32(0), jnp.float32(2.0), jnp.float32(1.0))
    config = BadStepConfig(loss_spike_factor=3.0, spike_warmup_steps=1)
    given = {"step": jnp.int32(2), "loss": jnp.float32(loss), "grad_norm": jnp.float32(1.0), "axis_names": ("dp",)}
    run = jax.vmap(lambda _: judge(guard, config, **given)[1].loss_average, axis_name="dp")
    assert run(jnp.zeros(1)) == average


def test_the_learning_rate_that_is_logged_is_that_of_the_update(tmp_path):
    trainer = make_trainer(path=tmp_path, trainer_class=FragileTrainer)
    train(trainer, 3)
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=4)
    expected = [float(trainer.lr_scheduler(update)) for update in (0, 1, 2, 3)]
    np.testing.assert_allclose([losses(tmp_path, "lr")[step] for step in (1, 2, 3, 4)], expected, rtol=1e-6)


def test_a_skipped_step_is_no_row_of_zeros(tmp_path, caplog):
    skip = BadStepConfig(policy="skip")
    trainer = make_trainer(path=tmp_path, trainer_class=FragileTrainer, bad_steps=skip)
    train(trainer, 2, num_steps=3)
    assert list(losses(tmp_path)) == [1, 3]
    assert "without any count" not in caplog.text
    np.testing.assert_allclose(losses(tmp_path, "lr")[3], float(trainer.lr_scheduler(1)), rtol=1e-6)


def test_a_run_that_only_meets_bad_batches_ends(tmp_path):
    trainer = make_trainer(
        path=tmp_path,
        trainer_class=FragileTrainer,
        bad_steps=BadStepConfig(policy="rollback", max_rollbacks=2),
        callbacks=[ModelCheckpointConfig(every_n_steps=1)],
    )
    with pytest.raises(RuntimeError, match="rolled back 2 times"):
        train(trainer, *range(3, 20))


def test_a_rollback_needs_checkpoints():
    with pytest.raises(ConfigError, match="ModelCheckpointConfig"):
        make_trainer(bad_steps=BadStepConfig(policy="rollback"))


def test_nothing_is_checked_if_nobody_asks():
    trainer = make_trainer(trainer_class=FragileTrainer, check_for_nan=False)
    train(trainer, 2, num_steps=3)
    assert int(trainer.state.step) == 3
    assert not all(np.isfinite(value).all() for value in params_of(trainer).values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_skipped_share": 1.5}, "max_skipped_share is 1.5: it has to be between 0 and 1"),
        ({"policy": "pray"}, "policy is 'pray': choose from stop, skip, rollback"),
        ({"loss_spike_factor": 1.0}, "loss_spike_factor is 1.0"),
        ({"spike_warmup_steps": 0}, "spike_warmup_steps is 0"),
    ],
)
def test_a_bad_config_is_refused(options, message, unchecked_shapes):
    with pytest.raises(ConfigError, match=message):
        BadStepConfig(**options)


def test_a_bad_step_is_noticed_at_the_end_though_nothing_is_logged():
    trainer = make_trainer(trainer_class=FragileTrainer, logger=None)
    statuses = []
    trainer.logger.finalize = statuses.append
    train(trainer, 3, num_steps=4)
    assert statuses == ["nan"]
    assert int(trainer.state.step) == 2
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=3)
    assert statuses == ["nan", "success"]
