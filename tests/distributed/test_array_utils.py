"""Slices of arrays, keys and stacked parameters of each device."""

import functools

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

from xlstm_jax.distributed import (
    ModelParallelismWrapper,
    PipelineModule,
    TPAsyncDense,
    TPDense,
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
    fold_rng_over_axis,
    shard_module_params,
    split_array_over_mesh,
    sync_gradients,
)
from xlstm_jax.distributed.array_utils import (
    axis_index,
    axis_size,
    gather_whole,
    mean_gradient_over,
    slice_own,
    stack_params,
    unstack_params,
)
from xlstm_jax.distributed.data_parallel import gather_array_with_mean_grads, gather_params, shard_params
from xlstm_jax.distributed.dense import RowDense
from xlstm_jax.distributed.norms import get_sharded_global_norm

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


AXIS_FUNCTIONS = {
    "axis_size": lambda x, axis: axis_size(axis),
    "axis_index": lambda x, axis: axis_index(axis),
    "fold_rng_over_axis": lambda x, axis: fold_rng_over_axis(jax.random.key(0), axis),
    "split_array_over_mesh": lambda x, axis: split_array_over_mesh(x, axis, 1),
    "gather_whole": lambda x, axis: gather_whole(x, (axis, None)),
    "slice_own": lambda x, axis: slice_own(x, (axis, None)),
    "mean_gradient_over": mean_gradient_over,
    "stack_params": stack_params,
    "unstack_params": unstack_params,
    "shard_params": shard_params,
    "gather_params": gather_params,
    "gather_array_with_mean_grads": lambda x, axis: gather_array_with_mean_grads(x, 0, axis),
    "shard_module_params": lambda x, axis: shard_module_params(nn.Dense, axis)(2).init(jax.random.key(0), x),
    "sync_gradients": sync_gradients,
    "async_gather": async_gather,
    "async_gather_bidirectional": async_gather_bidirectional,
    "async_gather_split": async_gather_split,
    "async_scatter": lambda x, axis: async_scatter([x], axis),
    "async_scatter_split": lambda x, axis: async_scatter_split([x], axis),
    "get_sharded_global_norm": lambda x, axis: get_sharded_global_norm(nn.Partitioned(x, (axis, None))),
    "ModelParallelismWrapper": lambda x, axis: ModelParallelismWrapper(axis, functools.partial(nn.Dense, 2)).init(
        jax.random.key(0), x
    ),
    "TPDense": lambda x, axis: TPDense(functools.partial(nn.Dense, 2), axis, "gather").init(jax.random.key(0), x),
    "TPAsyncDense": lambda x, axis: TPAsyncDense(functools.partial(nn.Dense, 2), axis).init(jax.random.key(0), x),
    "RowDense": lambda x, axis: RowDense(2, axis).init(jax.random.key(0), x),
    "execute_pipeline": lambda x, axis: PipelineModule(axis, 1, functools.partial(nn.Dense, 2)).init(
        jax.random.key(0), x
    ),
}


@pytest.mark.parametrize("name", AXIS_FUNCTIONS)
def test_an_axis_that_the_mesh_does_not_have_is_refused_by_name(name):
    def call(x):
        with pytest.raises(NameError, match="Unknown mesh axis 'ttp': the axes here are dp, fsdp, pp, tp"):
            AXIS_FUNCTIONS[name](x, "ttp")

    jax.eval_shape(jax.shard_map(call, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False), jnp.zeros((4, 2)))


@pytest.mark.parametrize("name", AXIS_FUNCTIONS)
def test_without_a_mesh_every_axis_name_is_accepted(name):
    AXIS_FUNCTIONS[name](jnp.zeros((4, 2)), "ttp")


def test_an_axis_that_only_a_vmap_binds_is_known_and_others_are_not():
    keys = jax.vmap(lambda _: jax.random.key_data(fold_rng_over_axis(jax.random.key(0), "tp")), axis_name="tp")
    assert len(np.unique(keys(jnp.arange(4)), axis=0)) == 4
    with pytest.raises(ValueError, match="Unknown mesh axis 'ttp'"):
        jax.vmap(lambda x: split_array_over_mesh(x, "ttp", 0), axis_name="tp")(jnp.zeros((4, 2)))


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


@pytest.mark.parametrize("index", [9, 2, -1])
def test_a_mask_for_a_device_that_does_not_exist_is_refused(index):
    def stack(x):
        with pytest.raises(ValueError, match=rf"mask_except is {index}, but the indices .* 'tp' are 0 to 1"):
            stack_params(x, "tp", mask_except=index)
        with pytest.raises(ValueError, match=rf"mask_except is {index}"):
            ModelParallelismWrapper("tp", functools.partial(nn.Dense, 2), mask_except_model_idx=index).apply(
                {"params": {"sharded": {"kernel": nn.Partitioned(x[None], ("tp", None, None))}}}, x
            )

    jax.eval_shape(jax.shard_map(stack, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False), jnp.zeros((2, 2)))


def test_a_traced_mask_for_a_device_that_does_not_exist_gives_nan():
    stacked = run_sharded(lambda x, index: stack_params(x, "tp", mask_except=index), MESH, jnp.ones(2), jnp.int32(9))
    assert np.isnan(stacked.value).all()


def test_the_gradient_of_a_split_parameter_is_that_of_the_mean_over_devices():
    def gradient(w):
        own = split_array_over_mesh(w, "tp", 0)
        return jax.grad(lambda own: jnp.sum(gather_whole(mean_gradient_over(own, "tp"), ("tp",)) ** 2))(own)

    w = jnp.arange(4.0)
    assert_close(on_mesh(gradient, MESH, out_specs=P("tp"))(w), 2 * w)
