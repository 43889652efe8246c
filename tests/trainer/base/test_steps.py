"""Steps with the loss functions that users write."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from meshes import AXES, make_mesh, on_mesh

from xlstm_jax.common_types import TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.base.steps import StepLogging, eval_step, train_step
from xlstm_jax.trainer.metrics import get_metrics
from xlstm_jax.trainer.user_functions import documented_loss

pytestmark = pytest.mark.slow


class Regression(nn.Module):
    """A layer that sows its output and keeps a running mean."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(1, name="layer")(x)
        self.sow("intermediates", "output", jnp.mean(y))
        self.sow("intermediates", "blocks", jnp.stack([jnp.mean(y), jnp.mean(x)]))
        mean = self.variable("statistics", "mean", jnp.zeros, ())
        if self.is_mutable_collection("statistics"):
            mean.value = mean.value + jnp.mean(x)
        return y


MODEL = Regression()
BATCH = Batch(inputs=jnp.arange(16.0).reshape(16, 1) / 16, targets=jnp.ones((16, 1)))


def squared_error(params, apply_fn, batch, rng, train=True):
    """The signature of the documentation, without what the steps may offer besides."""
    variables = {"params": params, "statistics": {"mean": jnp.zeros(())}}
    mutable = ["intermediates", "statistics"]
    prediction, mutated = apply_fn(variables, batch.inputs, mutable=mutable)
    loss = jnp.mean(jnp.square(prediction - batch.targets))
    metrics = {"loss": {"value": loss, "count": 1}, "largest": {"value": jnp.max(batch.inputs), "log_modes": ["max"]}}
    return loss, (metrics, mutated)


def run_step(sizes, *, loss=squared_error, variables=None, **options):
    """Take one step on a mesh; return the state and the metrics on the host."""
    initial = MODEL.init(jax.random.key(0), BATCH.inputs)
    state = TrainState.create(
        apply_fn=MODEL.apply,
        params=initial["params"],
        tx=optax.sgd(0.1),
        rng=jax.random.key(1),
        mutable_variables=variables or {"statistics": initial["statistics"]},
    )
    step = functools.partial(
        train_step, axis_names=AXES, loss_function=documented_loss(loss), count_targets=lambda batch: None, **options
    )
    run = on_mesh(lambda state, batch: step(state, batch, None), make_mesh(**sizes), (P(), P(AXES)), (P(), P()))
    state, metrics = run(state, BATCH)
    return state, get_metrics(metrics)[1]


@pytest.mark.parametrize("sizes", [{}, {"dp": 8}, {"dp": 2, "fsdp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("num_minibatches", [1, 2])
def test_a_documented_loss_function_is_averaged(sizes, num_minibatches):
    state, metrics = run_step(sizes, num_minibatches=num_minibatches)
    expected, expected_metrics = run_step({})
    np.testing.assert_allclose(state.params["layer"]["kernel"], expected.params["layer"]["kernel"], rtol=1e-5)
    assert state.step == 1
    for name in ("loss_mean", "grad_norm_mean", "param_norm"):
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5)
    assert metrics["largest_max"] == 15 / 16


def test_a_metric_without_a_count_is_a_mean_over_minibatches_too():
    def loss(params, apply_fn, batch, rng, train=True):
        value, (_, variables) = squared_error(params, apply_fn, batch, rng, train)
        return value, ({"plain": value}, variables)

    plain = [run_step({"dp": 2}, loss=loss, num_minibatches=n)[1]["plain_mean"] for n in (1, 2, 4)]
    np.testing.assert_allclose(plain, plain[0], rtol=1e-5)


@pytest.mark.parametrize("sizes", [{}, {"dp": 4}], ids=str)
@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_variables_are_the_mean_over_minibatches_and_counters_stay_whole(sizes, num_minibatches):
    def loss(params, apply_fn, batch, rng, train=True, mutable_variables=None):
        value, (metrics, variables) = squared_error(params, apply_fn, batch, rng, train)
        return value, (metrics, {**variables, "counters": {"steps": mutable_variables["counters"]["steps"] + 1}})

    variables = {"statistics": {"mean": jnp.zeros(())}, "counters": {"steps": jnp.zeros((), jnp.int32)}}
    state, _ = run_step(sizes, loss=loss, num_minibatches=num_minibatches, variables=variables)
    np.testing.assert_allclose(state.mutable_variables["statistics"]["mean"], np.mean(BATCH.inputs), rtol=1e-6)
    assert state.mutable_variables["counters"]["steps"].dtype == jnp.int32
    assert state.mutable_variables["counters"]["steps"] == 1


def test_a_variable_that_is_no_float_is_that_of_the_last_minibatch():
    def loss(params, apply_fn, batch, rng, train=True):
        value, (metrics, _) = squared_error(params, apply_fn, batch, rng, train)
        return value, (metrics, {"counters": {"largest": jnp.max(16 * batch.inputs).astype(jnp.int32)}})

    state, _ = run_step({}, loss=loss, num_minibatches=4, variables={"counters": {"largest": jnp.int32(0)}})
    assert state.mutable_variables["counters"]["largest"] == 15


def test_variables_that_a_loss_function_does_not_return_stay():
    def loss(params, apply_fn, batch, rng, train=True):
        value, (metrics, _) = squared_error(params, apply_fn, batch, rng, train)
        return value, (metrics, None)

    state, _ = run_step({"dp": 2}, loss=loss, variables={"statistics": {"mean": jnp.full((), 7.0)}})
    assert state.mutable_variables["statistics"]["mean"] == 7


def test_variables_are_the_mean_over_devices():
    state, _ = run_step({"dp": 8})
    np.testing.assert_allclose(state.mutable_variables["statistics"]["mean"], np.mean(BATCH.inputs), rtol=1e-6)
    assert "intermediates" not in state.mutable_variables


def test_what_is_sown_is_reported_for_each_block():
    _, metrics = run_step({"dp": 8}, num_minibatches=2, logging=StepLogging(intermediates_modes=("mean", "single")))
    for mode in ("mean", "single"):
        np.testing.assert_allclose(metrics[f"output.0_0_{mode}"], metrics[f"blocks.0_0_{mode}"], rtol=1e-6)
        np.testing.assert_allclose(metrics[f"blocks.0_1_{mode}"], np.mean(BATCH.inputs), rtol=1e-6)


def test_norms_are_reported_where_asked_for():
    _, metrics = run_step({}, logging=StepLogging(grad_norm=False, param_norm_per_param=True))
    assert not any("grad_norm" in name for name in metrics)
    assert "param_norm_layer.kernel" in metrics


def test_keys_differ_between_steps_and_minibatches():
    def loss(params, apply_fn, batch, rng, train=True):
        value, (_, variables) = squared_error(params, apply_fn, batch, rng, train)
        return value, ({"draw": {"value": jax.random.uniform(rng), "log_modes": ["std", "mean"]}}, variables)

    (first, one), (_, two) = (run_step({}, loss=loss, num_minibatches=n) for n in (1, 2))
    assert one["draw_mean"] != two["draw_mean"]
    assert not np.array_equal(jax.random.key_data(first.rng), jax.random.key_data(jax.random.key(1)))


def test_an_evaluation_changes_nothing_and_counts_on():
    def loss(params, apply_fn, batch, rng, train=True):
        assert not train
        return squared_error(params, apply_fn, batch, rng, train)

    state, _ = run_step({"dp": 8})
    options = {"axis_names": AXES, "loss_function": documented_loss(loss), "count_targets": lambda batch: None}
    step = functools.partial(eval_step, **options)
    run = on_mesh(step, make_mesh(dp=8), (P(), P(AXES), P()), P())
    once = run(state, BATCH, None)
    twice = run(state, BATCH, once)
    np.testing.assert_allclose(get_metrics(twice)[1]["loss"], get_metrics(once)[1]["loss"], rtol=1e-6)
