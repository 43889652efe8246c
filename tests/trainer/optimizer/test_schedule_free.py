"""Schedule-free AdamW: evaluation uses the average of the weights."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from meshes import make_mesh, on_mesh, unboxed_tree
from tolerances import assert_close
from trainer.optimizer.layouts import LAYOUTS, boxed, params_and_gradients
from trainer.runs import SGD, SizedTokenLoader, TokenLoader, make_trainer

from xlstm_jax.common_types import TrainState
from xlstm_jax.trainer.callbacks.ema import ParameterEMAConfig
from xlstm_jax.trainer.callbacks.extended_evaluation import EvalState
from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer, get_eval_params

pytestmark = pytest.mark.slow

CONFIG = OptimizerConfig(
    name="schedule_free_adamw", scheduler=SchedulerConfig(lr=0.1), weight_decay=0.1, grad_clip_norm=1.0
)


def eval_params_after_steps(params, num_steps: int = 3):
    optimizer, _ = build_optimizer(CONFIG)
    state = optimizer.init(params)
    for _ in range(num_steps):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
    return get_eval_params(state, params)


def test_parameters_to_evaluate_with_are_the_mean_of_the_points_of_the_base_optimizer():
    optimizer, _ = build_optimizer(CONFIG)
    params = {"kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]])}
    state, points = optimizer.init(params), []
    for _ in range(3):
        updates, state = optimizer.update(params, state, params)
        params = optax.apply_updates(params, updates)
        points.append(state[1].z["kernel"])
    assert_close(get_eval_params(state, params)["kernel"], sum(points) / 3)
    assert not jnp.allclose(get_eval_params(state, params)["kernel"], params["kernel"], rtol=1e-4)


def test_an_extended_evaluation_evaluates_the_average():
    optimizer, _ = build_optimizer(CONFIG)
    state = TrainState.create(apply_fn=print, params={"kernel": jnp.array([1.0, -2.0])}, tx=optimizer, rng=None)
    for _ in range(2):
        state = state.apply_gradients(grads=state.params)
    evaluated = EvalState.from_train_state(train_state=state).params["kernel"]
    assert_close(evaluated, get_eval_params(state.opt_state, state.params)["kernel"])
    assert not jnp.allclose(evaluated, state.params["kernel"], rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "muon", "none"])
def test_other_optimizers_are_evaluated_with_the_parameters_themselves(name):
    optimizer, _ = build_optimizer(OptimizerConfig(name=name, grad_clip_value=1.0))
    params = {"kernel": jnp.ones((2, 2))}
    assert get_eval_params(optimizer.init(params), params) is params


def test_parameters_to_evaluate_with_do_not_depend_on_the_mesh():
    layout = LAYOUTS["two_axes"]
    params, _ = params_and_gradients()
    expected = jax.jit(eval_params_after_steps)(params)
    specs = nn.get_partition_spec(boxed(params, layout))
    sharded = on_mesh(eval_params_after_steps, make_mesh(**layout.mesh), (specs,), specs)(boxed(params, layout))
    assert_close(unboxed_tree(sharded), expected)


@pytest.fixture(scope="module")
def trainer():
    """A trainer after five steps."""
    optimizer = OptimizerConfig(name="schedule_free_adamw", scheduler=SchedulerConfig(lr=0.05))
    trainer = make_trainer(optimizer=optimizer, callbacks=[ParameterEMAConfig(decay=0.5)])
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=5)
    return trainer


def loss_of(trainer):
    return trainer.eval_model(SizedTokenLoader(trainer.mesh, seed=1, num_batches=1), mode="val", epoch_idx=0)["loss"]


def test_a_trainer_evaluates_the_average(trainer):
    plain = make_trainer(optimizer=SGD)
    plain.restore_model({"params": get_eval_params(trainer.state.opt_state, trainer.state.params)})
    assert loss_of(trainer) == pytest.approx(loss_of(plain), rel=1e-6)
    plain.restore_model({"params": trainer.state.params})
    assert loss_of(trainer) != pytest.approx(loss_of(plain), rel=1e-4)


def test_a_moving_average_takes_the_place_of_the_average(trainer):
    average = trainer.callbacks[0]
    with average.swapped():
        assert_close(get_eval_params(trainer.state.opt_state, trainer.state.params), average.params)


def test_a_run_that_starts_from_other_parameters_does_not_go_back_to_its_own(trainer):
    other = make_trainer(optimizer=trainer.optimizer_config, seed=7)
    other.restore_model({"params": trainer.state.params})
    assert_close(get_eval_params(other.state.opt_state, other.state.params), trainer.state.params)
    other.train_model(TokenLoader(other.mesh), num_train_steps=1)
    assert int(other.state.step) == 1
