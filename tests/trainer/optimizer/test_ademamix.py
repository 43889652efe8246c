"""AdEMAMix: its two schedules, its rule and the names it is documented with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tolerances import assert_close

from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer
from xlstm_jax.trainer.optimizer import ademamix as ademamix_module
from xlstm_jax.trainer.optimizer.ademamix import ScaleByAdemamixState, ademamix, alpha_scheduler, beta3_scheduler


def half_life(decay_rate: float) -> float:
    return float(np.log(0.5) / np.log(decay_rate))


def test_alpha_rises_linearly_to_its_value_and_stays_there():
    schedule = alpha_scheduler(8.0, alpha_start=2.0, warmup=10)
    assert_close([schedule(step) for step in (0, 5, 10, 99)], [2.0, 5.0, 8.0, 8.0])


def test_the_half_life_of_beta3_rises_linearly():
    schedule = beta3_scheduler(0.99, beta_start=0.9, warmup=4)
    expected = np.linspace(half_life(0.9), half_life(0.99), 5)
    actual = [half_life(float(schedule(step))) for step in range(5)]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    assert_close(schedule(1000), 0.99)


def test_beta3_can_start_from_zero():
    schedule = beta3_scheduler(0.99, warmup=4)
    assert schedule(0) == 0
    assert 0 < schedule(1) < schedule(2) < 0.99


@pytest.mark.parametrize("schedule", [alpha_scheduler(8.0), beta3_scheduler(0.9999)])
def test_without_a_warm_up_the_end_holds_from_the_first_step(schedule):
    assert schedule(0) == schedule(100) > 0.99


@pytest.mark.parametrize("schedule", [alpha_scheduler(8.0, warmup=10), beta3_scheduler(0.9999, 0.9, warmup=10)])
def test_a_traced_step_gives_the_same_setting_as_a_python_integer(schedule):
    traced = jax.jit(schedule)
    assert_close([traced(jnp.int32(step)) for step in (0, 3, 10)], [schedule(step) for step in (0, 3, 10)])


def test_one_step_is_that_of_the_paper():
    gradient, param = np.array([0.5, -2.0, 0.0]), np.array([1.0, 2.0, -3.0])
    b1, b2, b3, alpha, lr, decay = 0.9, 0.99, 0.999, 5.0, 0.1, 0.01
    optimizer = ademamix(lr, b1, b2, b3, alpha, weight_decay=decay)
    params = {"w": jnp.asarray(param, jnp.float32)}
    state, slow, fast, second = optimizer.init(params), 0.0, 0.0, 0.0
    for step in (1, 2):
        updates, state = optimizer.update({"w": jnp.asarray(gradient, jnp.float32)}, state, params)
        fast, slow = b1 * fast + (1 - b1) * gradient, b3 * slow + (1 - b3) * gradient
        second = b2 * second + (1 - b2) * gradient**2
        direction = (fast / (1 - b1**step) + alpha * slow) / (np.sqrt(second / (1 - b2**step)) + 1e-8)
        assert_close(updates["w"], -lr * (direction + decay * param))


@pytest.mark.parametrize(("decay_steps", "warmup"), [(50, 50), (None, 100_000), (0, 100_000)])
def test_the_warm_up_lasts_as_long_as_the_learning_rate_schedule(decay_steps, warmup):
    config = OptimizerConfig(
        name="ademamix", beta3=0.99, alpha=4.0, scheduler=SchedulerConfig(lr=0.1, decay_steps=decay_steps)
    )
    expected = ademamix(
        0.1,
        b3_scheduler=beta3_scheduler(0.99, 0.9, warmup),
        alpha_scheduler=alpha_scheduler(4.0, 0.0, warmup),
    )
    params = {"w": jnp.ones(3)}
    actual_state, expected_state = build_optimizer(config)[0].init(params), expected.init(params)
    for _ in range(3):
        actual_updates, actual_state = build_optimizer(config)[0].update(params, actual_state, params)
        expected_updates, expected_state = expected.update(params, expected_state, params)
    assert_close(actual_updates, expected_updates)
    assert_close(actual_state[0][0], expected_state[0])


def test_moments_keep_their_data_type():
    optimizer = ademamix(0.1, b3_scheduler=beta3_scheduler(0.99, 0.9, 10), mu_dtype=jnp.dtype("bfloat16"))
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    _, after = optimizer.update(params, state, params)
    assert isinstance(after[0], ScaleByAdemamixState)
    assert after[0].m2["w"].dtype == jnp.bfloat16
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)


def test_the_documented_tree_functions_are_those_of_optax():
    tree = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    zeros = ademamix_module.tree_zeros_like(tree)
    assert_close(ademamix_module.tree_update_moment(tree, zeros, 0.9, 1), jax.tree.map(lambda x: 0.1 * x, tree))
    squares = ademamix_module.tree_update_moment_per_elem_norm(tree, zeros, 0.9, 2)
    assert_close(squares, jax.tree.map(lambda x: 0.1 * x**2, tree))
    assert_close(ademamix_module.tree_bias_correction(tree, 0.5, 1), optax.tree.scale(2.0, tree))
    assert ademamix_module.tree_cast(tree, jnp.float16)["a"].dtype == jnp.float16
