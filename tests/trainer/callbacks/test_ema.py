"""The average of the parameters is exact, stays where they are, and is validated beside them."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close
from trainer.callbacks.regression import draw_batches, make_regression, read_rows
from trainer.runs import make_trainer

from xlstm_jax.configs import ConfigError
from xlstm_jax.trainer.base.guard import BadStepConfig
from xlstm_jax.trainer.callbacks import Callback, CallbackConfig
from xlstm_jax.trainer.callbacks.ema import ParameterEMAConfig


def on_host(params):
    return jax.tree.map(np.array, params)


@dataclasses.dataclass(kw_only=True, frozen=False)
class HistoryConfig(CallbackConfig):
    """Of a callback that keeps all parameters."""

    def create(self, trainer, data_module=None):
        return History(self, trainer, data_module)


class History(Callback):
    """Keeps the parameters before training and after each step."""

    def on_training_start(self):
        self.params = [on_host(self.trainer.state.params)]

    def on_training_step(self, step_metrics, epoch_idx, step_idx):
        self.params.append(on_host(self.trainer.state.params))


def average_by_hand(history, *, decay, every=1):
    average = history[0]
    for params in history[every::every]:
        average = jax.tree.map(lambda mean, x: decay * mean + (1 - decay) * x, average, params)
    return average


@pytest.mark.parametrize("every", [1, 2])
def test_the_average_is_that_of_the_steps(every):
    trainer = make_regression(callbacks=[HistoryConfig(), ParameterEMAConfig(decay=0.7, every_n_steps=every)])
    trainer.train_model(draw_batches(5), num_epochs=1)
    history, ema = trainer.callbacks
    assert_close(on_host(ema.params), average_by_hand(history.params, decay=0.7, every=every))


def test_a_bad_step_counts_as_one_that_changed_nothing():
    trainer = make_regression(
        callbacks=[HistoryConfig(), ParameterEMAConfig(decay=0.7)], bad_steps=BadStepConfig(policy="skip")
    )
    trainer.train_model(draw_batches(5, bad={2}), num_epochs=1)
    history, ema = trainer.callbacks
    assert_close(history.params[3], history.params[2])
    assert_close(on_host(ema.params), average_by_hand(history.params, decay=0.7))


def test_the_average_is_validated_beside_the_parameters(tmp_path):
    trainer = make_regression(tmp_path, callbacks=[ParameterEMAConfig(decay=0.7)])
    val_batches = draw_batches(2, seed=1)
    results = trainer.train_model(draw_batches(3), val_batches, num_epochs=2)
    with trainer.callbacks[0].swapped():
        expected = trainer.eval_model(val_batches, mode="val", epoch_idx=2)["loss"]
    rows = read_rows(tmp_path, "val_ema")
    assert [row["log_step"] for row in rows] == [3, 6]
    assert rows[-1]["loss"] == expected != results["val_epoch_2"]["loss"]
    assert trainer.eval_step._cache_size() == 1


@pytest.mark.parametrize("options", [{"evaluate": False}, {"every_n_epochs": 3}])
def test_the_validation_of_the_average_can_be_left_out(tmp_path, options):
    trainer = make_regression(tmp_path, callbacks=[ParameterEMAConfig(**options)])
    trainer.train_model(draw_batches(1), draw_batches(1), num_epochs=2)
    assert not list(tmp_path.glob("file_logs/metrics_val_ema*"))


def test_the_state_comes_back_after_an_error():
    trainer = make_regression(callbacks=[ParameterEMAConfig(decay=0.7)])
    trainer.train_model(draw_batches(3), num_epochs=1)
    state, ema = trainer.state, trainer.callbacks[0]

    def fail():
        with ema.swapped():
            assert_close(on_host(trainer.state.params), on_host(ema.params))
            raise KeyError("broken")

    with pytest.raises(KeyError):
        fail()
    assert trainer.state is state


def test_a_second_run_goes_on_with_the_average():
    trainer = make_regression(callbacks=[HistoryConfig(), ParameterEMAConfig(decay=0.7)])
    history, ema = trainer.callbacks
    trainer.train_model(draw_batches(2), num_epochs=1)
    first = history.params
    trainer.train_model(draw_batches(2), num_epochs=2)
    assert_close(on_host(ema.params), average_by_hand(first + history.params[1:], decay=0.7))


@pytest.fixture(scope="module")
def sharded():
    """The trainer of a language model over eight devices, in which parameters are split in several ways."""
    return make_trainer({"dp": 2, "fsdp": 2, "tp": 2}, callbacks=[ParameterEMAConfig(decay=0.5)])


def test_the_average_lies_where_the_parameters_do(sharded):
    ema, params = sharded.callbacks[0], sharded.state.params
    ema.on_training_start()
    shardings = jax.tree.map(lambda x: x.sharding, params)
    assert len(set(jax.tree.leaves(shardings))) > 1
    for step in (1, 2, 3):
        before = ema.params
        ema.on_training_step({}, 1, step)
        assert jax.tree.map(lambda x: x.sharding, ema.params) == shardings
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert ema._update._cache_size() == 1
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    assert_close(on_host(ema.params), on_host(params))


def test_the_average_goes_through_a_checkpoint(sharded):
    ema = sharded.callbacks[0]
    ema.load_arrays({})
    (name, average), *others = ema.arrays().items()
    assert (name, others) == ("ema_params", [])
    stored = jax.tree.map(lambda x: np.array(x) + 1, average)
    ema.load_arrays({name: stored})
    assert_close(on_host(ema.params), stored)
    assert jax.tree.map(lambda x: x.sharding, ema.params) == jax.tree.map(lambda x: x.sharding, average)


def test_a_checkpoint_without_an_average_starts_it_from_the_parameters():
    trainer = make_regression(callbacks=[ParameterEMAConfig(decay=0.7)])
    ema = trainer.callbacks[0]
    ema.arrays()
    loaded = jax.tree.map(lambda x: x + 1, on_host(trainer.state.params))
    trainer.restore_model({"params": loaded})
    ema.load_arrays({})
    ema.on_training_start()
    assert_close(on_host(ema.params), loaded)


class State(SimpleNamespace):
    """No more of a train state than its parameters, and an optimizer without a state."""

    opt_state = ()

    def replace(self, params, opt_state):
        return State(params=params, opt_state=opt_state)


def test_parameters_of_low_precision_have_an_average_of_full_precision():
    trainer = SimpleNamespace(state=State(params={"weight": jnp.ones(3, jnp.bfloat16)}))
    ema = ParameterEMAConfig(decay=0.999).create(trainer)
    ema.on_training_start()
    trainer.state = State(params={"weight": jnp.full(3, 2, jnp.bfloat16)})
    ema.on_training_step({}, 1, 1)
    assert_close(on_host(ema.params), {"weight": np.full(3, 1.001, np.float32)})
    with ema.swapped():
        assert trainer.state.params["weight"].dtype == jnp.bfloat16
    assert ema.params["weight"].dtype == jnp.float32


def test_an_update_fetches_nothing(monkeypatch):
    fetched = []
    array_class = type(jnp.zeros(()))
    value = array_class._value
    trainer = SimpleNamespace(state=State(params={"weight": jnp.ones(3)}))
    ema = ParameterEMAConfig().create(trainer)
    monkeypatch.setattr(array_class, "_value", property(lambda x: fetched.append(x.shape) or value.fget(x)))
    ema.on_training_start()
    ema.on_training_step({}, 1, 1)
    assert fetched == []
    assert float(ema.params["weight"][0]) == 1.0
    assert fetched == [()]  # This is how a fetch shows.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"decay is 1\.0"),
        ({"decay": -0.1}, r"decay is -0\.1"),
        ({"every_n_steps": 0}, "every_n_steps is 0"),
        ({"main_process_only": True}, "all processes have to take part"),
    ],
)
def test_a_bad_config_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ParameterEMAConfig(**options)
