"""Muon: which parameters are matrices, and how far an update of a matrix goes."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from meshes import make_mesh, on_mesh
from trainer.optimizer.layouts import LAYOUTS, boxed, flat, params_and_gradients, run_on_one_device

from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.muon import find_matrices, orthogonalize

DEFAULTS = OptimizerConfig(name="muon")
MATRICES = {"block_stack.block.up.kernel", "block_stack.block.down.kernel", "projection.kernel"}


def names_of_matrices(params, exclude=DEFAULTS.muon_exclude, stacked=DEFAULTS.stacked_params) -> set[str]:
    return {name for name, is_matrix in flat(find_matrices(params, exclude, stacked)).items() if is_matrix}


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_kernels_are_matrices_and_embeddings_are_not(layout):
    params = params_and_gradients()[0]
    assert names_of_matrices(params if layout is None else boxed(params, LAYOUTS[layout])) == MATRICES


def test_a_language_model_head_is_no_matrix_by_default():
    params = {"lm_head": {"kernel": jnp.ones((4, 4))}, "up": {"kernel": jnp.ones((4, 4))}}
    assert names_of_matrices(params) == {"up.kernel"}
    assert names_of_matrices(params, exclude=[]) == {"up.kernel", "lm_head.kernel"}


def test_without_stacked_parameters_a_leaf_of_two_axes_is_a_matrix():
    names = names_of_matrices(params_and_gradients()[0], stacked=[])
    assert names == {"projection.kernel", "block_stack.block.up.bias"}


def first_update(**fields) -> dict:
    config = OptimizerConfig(name="muon", scheduler=SchedulerConfig(lr=1.0), **fields)
    return {name: np.asarray(x[0]) for name, x in flat(run_on_one_device(build_optimizer(config)[0])).items()}


def test_all_directions_of_a_matrix_are_followed_alike():
    updates = first_update()
    for name in MATRICES:
        singular_values = np.linalg.svd(updates[name], compute_uv=False)
        assert singular_values.max() / singular_values.min() < 2.5, name


def test_updates_of_matrices_are_about_as_large_as_those_of_adam():
    rms = {name: np.sqrt(np.mean(update**2)) for name, update in first_update().items()}
    for name in MATRICES:
        assert 0.1 < rms[name] < 0.25, name
    # Adam's first step is the sign of the gradient; later ones are smaller.
    assert rms["token_embedding.embedding"] == pytest.approx(1.0, rel=1e-3)


def test_a_zero_gradient_leaves_a_matrix_where_it_is():
    optimizer, _ = build_optimizer(DEFAULTS)
    params = {"kernel": jnp.ones((4, 3))}
    updates, _ = optimizer.update({"kernel": jnp.zeros((4, 3))}, optimizer.init(params), params)
    assert jnp.all(updates["kernel"] == 0)


@pytest.mark.parametrize(("names", "is_gathered"), [(("pp", None, None), False), ((None, "pp", None), True)])
def test_only_matrices_that_are_split_are_gathered(names, is_gathered):
    stack = nn.Partitioned(jnp.ones((4, 4, 6)), names)
    specs = nn.get_partition_spec(stack)
    rule = orthogonalize(1e-8)
    run = on_mesh(lambda x: rule.update(x, rule.init(x))[0], make_mesh(pp=2), (specs,), specs)
    assert ("all_gather" in str(run.trace(stack).jaxpr)) == is_gathered
