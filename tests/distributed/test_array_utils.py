"""Slices of arrays, keys and stacked parameters of each device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh, run_sharded
from tolerances import assert_close

from xlstm_jax.distributed import fold_rng_over_axis, split_array_over_mesh
from xlstm_jax.distributed.array_utils import (
    axis_size,
    gather_whole,
    mean_gradient_over,
    slice_own,
    stack_params,
    unstack_params,
)

MESH = make_mesh(dp=2, fsdp=2, tp=2)


def test_each_device_along_the_axis_gets_a_key_of_its_own(key):
    keys = on_mesh(lambda key: fold_rng_over_axis(key, "tp")[None], MESH, out_specs=P(("dp", "fsdp", "tp")))(key)
    rows = np.asarray(jax.random.key_data(keys))
    assert len(np.unique(rows, axis=0)) == 2
    assert (rows[0::2] == rows[0]).all()


def test_a_key_folded_over_two_axes_differs_on_all_their_devices(key):
    keys = on_mesh(lambda key: fold_rng_over_axis(key, ("dp", "tp"))[None], MESH, out_specs=P(("dp", "fsdp", "tp")))(
        key
    )
    assert len(np.unique(np.asarray(jax.random.key_data(keys)), axis=0)) == 4


def test_folding_without_a_mesh_is_folding_on_the_first_device(key):
    expected = jax.random.fold_in(key, 0)
    assert jax.random.key_data(fold_rng_over_axis(key, "tp")).tolist() == jax.random.key_data(expected).tolist()


@pytest.mark.parametrize("split_axis", [0, 1, -1])
def test_the_slices_of_all_devices_make_up_the_array(split_axis):
    x = jnp.arange(4 * 6 * 2).reshape(4, 6, 2)
    spec = [None, None, None]
    spec[split_axis] = "tp"
    split = on_mesh(lambda x: split_array_over_mesh(x, "tp", split_axis), MESH, out_specs=P(*spec))
    np.testing.assert_array_equal(split(x), x)


def test_an_array_that_does_not_divide_over_the_axis_is_refused():
    with pytest.raises(ValueError, match=r"5 is not a multiple of 2"):
        on_mesh(lambda x: split_array_over_mesh(x, "tp", 0), MESH)(jnp.zeros(5))


def test_without_a_mesh_an_axis_has_one_device_and_arrays_stay_whole():
    x = jnp.arange(3)
    assert axis_size(("dp", "tp")) == 1
    assert split_array_over_mesh(x, "tp", 0) is x
    assert mean_gradient_over(x, "tp") is x


@pytest.mark.parametrize("names", [("tp", None), (None, ("fsdp", "tp")), ("dp", "tp"), (None, None)], ids=str)
def test_gathering_inverts_slicing(names):
    x = jnp.arange(32.0).reshape(4, 8)
    both = on_mesh(
        lambda x: (gather_whole(slice_own(x, names), names), slice_own(x, names)), MESH, out_specs=(P(), P(*names))
    )
    whole, parts = both(x)
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(parts, x)


def boxed(value, names):
    return nn.Partitioned(value, names) if any(names) else value


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    data=st.data(),
    axis_name=st.sampled_from(["tp", "pp", ("fsdp", "tp")]),
)
def test_unstacking_inverts_stacking(shape, data, axis_name):
    names = data.draw(st.tuples(*[st.sampled_from([None, "dp"]) for _ in shape]))
    axis = data.draw(st.integers(-len(shape) - 1, len(shape)))
    tree = {"a": boxed(jnp.arange(np.prod(shape, dtype=int)).reshape(shape), names), "b": jnp.float32(1)}
    axis_of_tree = axis if axis in (0, -1) else 0
    stacked = {"a": stack_params(tree["a"], axis_name, axis), "b": stack_params(tree["b"], axis_name, axis_of_tree)}
    position = axis if axis >= 0 else len(shape) + 1 + axis
    assert stacked["a"].names[position] == axis_name
    assert stacked["a"].value.shape == (*shape[:position], 1, *shape[position:])
    back = unstack_params(stacked, axis_name)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)


def test_parameters_stacked_over_several_axes_unstack_in_any_order():
    x = jnp.arange(6).reshape(2, 3)
    stacked = stack_params(stack_params(stack_params(x, "tp", 1), "pp", 0), "fsdp", -1)
    assert stacked.names == ("pp", None, "tp", None, "fsdp")
    for order in (("tp", "pp", "fsdp"), ("fsdp", "tp", "pp"), ("pp", "fsdp", "tp")):
        back = stacked
        for name in order:
            back = unstack_params(back, name)
        np.testing.assert_array_equal(back, x)


def test_an_axis_outside_of_the_parameter_is_refused():
    with pytest.raises(ValueError, match=r"axis at 3 into a parameter of shape \(2,\)"):
        stack_params(jnp.zeros(2), "tp", axis=3)


@pytest.mark.parametrize("as_traced", [False, True], ids=["int", "traced array"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_mask_leaves_only_one_shard(axis, as_traced):
    x = jnp.arange(1.0, 7).reshape(2, 3)

    def stack(x, index):
        stacked = stack_params({"w": x}, "tp", axis=axis, mask_except=index if as_traced else 1)
        return stacked, {"w": stack_params(unstack_params(stacked, "tp")["w"], "tp")}

    stacked, back = run_sharded(stack, MESH, x, jnp.int32(1))
    expected = np.stack([np.zeros_like(x), x], axis=axis)
    np.testing.assert_array_equal(stacked["w"].value, expected)
    np.testing.assert_array_equal(back["w"].value, np.stack([np.zeros_like(x), x]))


def test_the_gradient_of_a_split_parameter_is_that_of_the_mean_over_devices():
    def gradient(w):
        own = split_array_over_mesh(w, "tp", 0)
        return jax.grad(lambda own: jnp.sum(gather_whole(mean_gradient_over(own, "tp"), ("tp",)) ** 2))(own)

    w = jnp.arange(4.0)
    assert_close(on_mesh(gradient, MESH, out_specs=P("tp"))(w), 2 * w)
