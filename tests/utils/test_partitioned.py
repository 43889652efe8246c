"""Boxes name the mesh axes of a leaf, and are read the same way with and without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from xlstm_jax.utils.partitioned import (
    axes_of,
    is_partitioned,
    map_unboxed,
    partition_axes,
    partition_names,
    reboxed,
    unboxed,
    with_names,
)

BOX = nn.Partitioned(jnp.ones((2, 3)), ("dp", None))


def test_only_boxes_are_partitioned():
    assert is_partitioned(BOX)
    assert not any(map(is_partitioned, [BOX.value, None, {"a": BOX}, jax.ShapeDtypeStruct((2,), jnp.int32)]))


def test_a_value_leaves_its_box_and_goes_back_into_one_like_it():
    assert unboxed(BOX) is BOX.value
    assert unboxed(3) == 3
    assert reboxed(BOX, "new").names == ("dp", None)
    assert reboxed(BOX, "new").value == "new"
    assert reboxed(BOX.value, "new") == "new"


@pytest.mark.parametrize(
    ("leaf", "names", "axes"),
    [
        (BOX, ("dp", None), ("dp",)),
        (nn.Partitioned(jnp.ones((2, 3, 4)), ("tp",)), ("tp", None, None), ("tp",)),
        (nn.Partitioned(jnp.ones((2, 3)), (("dp", "fsdp"), "tp")), (("dp", "fsdp"), "tp"), ("dp", "fsdp", "tp")),
        (nn.Partitioned(jax.ShapeDtypeStruct((2, 3), jnp.int32), (None, "tp")), (None, "tp"), ("tp",)),
        (np.ones((2, 3)), (None, None), ()),
        (jax.ShapeDtypeStruct((2,), jnp.int32), (None,), ()),
        (1.0, (), ()),
    ],
)
def test_every_dimension_has_a_name_or_none(leaf, names, axes):
    assert partition_names(leaf) == names
    assert partition_axes(leaf) == axes


def test_a_name_is_no_axis_one_or_several():
    assert axes_of(None) == ()
    assert axes_of("dp") == ("dp",)
    assert axes_of(("dp", "fsdp")) == ("dp", "fsdp")


def test_a_value_is_boxed_only_if_a_name_is_left():
    assert with_names(1, (None, None)) == 1
    assert with_names(1, ()) == 1
    assert with_names(1, (None, "tp")) == nn.Partitioned(1, (None, "tp"))


def test_a_map_over_boxed_trees_keeps_the_boxes_of_the_first():
    result = map_unboxed(jnp.add, {"a": BOX, "b": jnp.ones(2)}, {"a": jnp.ones((2, 3)), "b": jnp.ones(2)})
    assert result["a"].names == ("dp", None)
    np.testing.assert_array_equal(result["a"].value, np.full((2, 3), 2))
    np.testing.assert_array_equal(result["b"], [2, 2])


def test_boxes_open_inside_shard_map():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    boxed = {"x": nn.Partitioned(jnp.arange(8.0), ("dp",))}
    specs = nn.get_partition_spec(boxed)
    double = jax.shard_map(
        lambda tree: map_unboxed(lambda x: 2 * x, tree), mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
    )
    result = jax.jit(double)(boxed)
    np.testing.assert_array_equal(result["x"].value, 2 * np.arange(8))
