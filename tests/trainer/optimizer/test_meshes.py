"""Every optimizer makes the same update on every mesh, whole or split, and block by block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec
from meshes import make_mesh, on_mesh, specs_of, unboxed_tree
from tolerances import assert_close
from trainer.optimizer.layouts import (
    LAYOUTS,
    NUM_BLOCKS,
    boxed,
    flat,
    nested,
    params_and_gradients,
    run_on_mesh,
    run_on_one_device,
)

from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.optimizer import OPTIMIZERS

pytestmark = pytest.mark.slow

SCHEDULER = SchedulerConfig(lr=0.1, name="linear", decay_steps=10)


def build(name: str, **fields) -> optax.GradientTransformation:
    return build_optimizer(OptimizerConfig(name=name, scheduler=SCHEDULER, **fields))[0]


@functools.cache
def build_with_decay_and_clipping(name: str) -> optax.GradientTransformation:
    return build(name, weight_decay=0.1, weight_decay_exclude=["bias$"], grad_clip_norm=1.0)


@functools.cache
def updates_on_one_device(name: str):
    return run_on_one_device(build_with_decay_and_clipping(name))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_does_not_depend_on_the_mesh(name, layout):
    updates = run_on_mesh(build_with_decay_and_clipping(name), LAYOUTS[layout])
    assert_close(updates, updates_on_one_device(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stacked_blocks_are_updated_like_separate_ones(name):
    params, gradients = map(flat, params_and_gradients())
    separate_updates = run_on_one_device(
        build_with_decay_and_clipping(name), nested(unstack(params, axis=0)), nested(unstack(gradients, axis=1))
    )
    assert_close(unstack(flat(updates_on_one_device(name)), axis=1), flat(separate_updates))


def unstack(stacked: dict, axis: int) -> dict:
    """Give each block leaves of its own."""
    separate = {}
    for name, value in stacked.items():
        before, is_stacked, after = name.partition("block_stack.block.")
        if not is_stacked:
            separate[name] = value
            continue
        for block in range(NUM_BLOCKS):
            separate[f"{before}block_stack.block_{block}.{after}"] = jnp.take(value, block, axis=axis)
    return separate


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_blocks_are_told_apart_by_the_names_of_stacked_parameters(name):
    as_one = run_on_one_device(build(name, grad_clip_norm=1.0, stacked_params=[]))
    block_by_block = updates_on_one_device(name)
    kernel = "block_stack.block.up.kernel"
    assert not np.allclose(flat(as_one)[kernel], flat(block_by_block)[kernel], rtol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clipping", [{"grad_clip_norm": 2.0}, {"grad_clip_value": 0.7}])
def test_clipping_does_not_depend_on_the_mesh(clipping, layout):
    optimizer = build("sgd", beta1=None, **clipping)
    assert_close(run_on_mesh(optimizer, LAYOUTS[layout]), run_on_one_device(optimizer))


def first_step(optimizer: optax.GradientTransformation) -> tuple[dict, dict]:
    """Return the gradient and the update of the first step, for a learning rate of 0.1."""
    gradient = jax.tree.map(lambda x: x[0], params_and_gradients()[1])
    return gradient, jax.tree.map(lambda x: x[0], run_on_one_device(optimizer))


def test_a_clipped_gradient_has_the_norm_it_is_clipped_to():
    _, updates = first_step(build("sgd", beta1=None, grad_clip_norm=2.0))
    assert_close(optax.tree.norm(updates), 0.1 * 2.0)


def test_a_gradient_below_the_largest_norm_keeps_its_size():
    gradient, updates = first_step(build("sgd", beta1=None, grad_clip_norm=1e4))
    assert_close(updates, optax.tree.scale(-0.1, gradient))


def test_the_norm_is_clipped_before_the_values():
    _, updates = first_step(build("sgd", beta1=None, grad_clip_norm=2.0, grad_clip_value=0.1))
    only_norm = first_step(build("sgd", beta1=None, grad_clip_norm=2.0))[1]
    assert_close(updates, jax.tree.map(lambda x: jnp.clip(x, -0.01, 0.01), only_norm))


def test_clipping_by_the_local_norm_refuses_a_gradient_that_is_split():
    optimizer = build("sgd", grad_clip_norm=1.0, use_sharded_clip_norm=False)
    with pytest.raises(ValueError, match=r"kernel' is split over .*fsdp.* Set use_sharded_clip_norm=True"):
        run_on_mesh(optimizer, LAYOUTS["fsdp8"])


def test_clipping_by_the_local_norm_is_the_same_where_nothing_is_split():
    local = build("sgd", grad_clip_norm=1.0, use_sharded_clip_norm=False)
    assert_close(run_on_one_device(local), run_on_one_device(build("sgd", grad_clip_norm=1.0)))


NUM_SPLIT_MOMENTS = {"none": 0, "sgd": 6, "lion": 6, "muon": 9, "ademamix": 18}
"""Leaves of the state that are split where six parameters are; most optimizers have two moments of each."""


@pytest.mark.parametrize("name_of_optimizer", OPTIMIZERS)
def test_the_state_is_split_like_the_parameters(name_of_optimizer):
    layout = LAYOUTS["two_axes"]
    params = boxed(params_and_gradients()[0], layout)
    param_specs = nn.get_partition_spec(params)
    optimizer = build_with_decay_and_clipping(name_of_optimizer)

    def init_and_update(params):
        state = optimizer.init(params)
        return state, optimizer.update(params, state, params)[1]

    before, after = specs_of(init_and_update, make_mesh(**layout.mesh), params, in_specs=(param_specs,))
    assert before == after
    spec_of_param = {
        jax.tree_util.keystr(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(param_specs)
    }
    for path, spec in jax.tree_util.tree_leaves_with_path(before):
        name = jax.tree_util.keystr(path)
        expected = [param_spec for param, param_spec in spec_of_param.items() if name.endswith(param)]
        assert spec == (expected[0] if expected else PartitionSpec()), name
    assert sum(any(spec) for spec in jax.tree.leaves(before)) == NUM_SPLIT_MOMENTS.get(name_of_optimizer, 12)


def test_a_mask_does_not_depend_on_the_boxes():
    layout = LAYOUTS["fsdp8"]
    params = boxed(params_and_gradients()[0], layout)
    optimizer = build("adamw", weight_decay=1.0, weight_decay_include=[r"kernel$", "value"])

    def decay(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(zeros, optimizer.init(params), params)[0]

    specs = nn.get_partition_spec(params)
    updates = on_mesh(decay, make_mesh(**layout.mesh), (specs,), specs)(params)
    for name, update in flat(unboxed_tree(updates)).items():
        assert np.any(update != 0) == name.endswith("kernel"), name
