"""Schedule-free AdamW: evaluation uses the average of the weights."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from meshes import make_mesh, on_mesh, unboxed_tree
from tolerances import assert_close
from trainer.optimizer.layouts import LAYOUTS, boxed, params_and_gradients

from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer, get_eval_params

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
