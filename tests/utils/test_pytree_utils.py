"""Names, masks, shapes and differences of trees."""

import copy
import doctest
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import FrozenDict
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import xlstm_jax.utils
from xlstm_jax.common_types import TrainState
from xlstm_jax.utils import pytree_utils
from xlstm_jax.utils.partitioned import is_partitioned
from xlstm_jax.utils.pytree_utils import (
    RecursionLimit,
    delete_arrays_in_pytree,
    flatten_dict,
    flatten_pytree,
    get_param_mask_fn,
    get_shape_dtype_pytree,
    pytree_diff,
    pytree_key_path_to_str,
)

KEYS = st.text("abc_", min_size=1, max_size=3)
NUMBERS = st.integers(-9, 9) | st.floats(allow_nan=True, width=32)
TREES = st.recursive(
    NUMBERS | st.lists(NUMBERS, max_size=3).map(np.array) | st.none() | st.text("xy", max_size=2),
    lambda children: st.dictionaries(KEYS, children, max_size=3) | st.lists(children, max_size=3),
    max_leaves=8,
)


def boxed_params():
    return {
        "embed": {"kernel": jnp.ones((2, 4))},
        "block": {
            "norm": {"scale": jnp.ones(4)},
            "dense": {"kernel": nn.Partitioned(jnp.ones((4, 2)), (None, "tp")), "bias": jnp.ones(2)},
        },
    }


def test_the_package_exports_the_documented_names():
    for name in xlstm_jax.utils.__all__:
        assert getattr(xlstm_jax.utils, name) is getattr(pytree_utils, name)


def test_the_examples_in_the_documentation_hold():
    test = doctest.DocTestParser().get_doctest(
        pytree_diff.__doc__, {"np": np, "pytree_diff": pytree_diff}, "pytree_diff", None, 0
    )
    assert len(test.examples) >= 6
    assert doctest.DocTestRunner().run(test).failed == 0


@given(TREES)
def test_a_tree_does_not_differ_from_itself(tree):
    assert pytree_diff(tree, copy.deepcopy(tree)) is None


@given(TREES, KEYS, st.integers(-9, 9))
def test_a_changed_leaf_is_found_under_its_keys(tree, key, number):
    difference = pytree_diff({"rest": tree, key: [0, number]}, {"rest": tree, key: [0, number + 1]})
    assert difference == {key: {1: (number, number + 1)}}


@pytest.mark.parametrize(
    ("tree1", "tree2", "expected"),
    [
        (1, 1.0, None),
        (1, "1", (1, "1")),
        ("a", "b", ("a", "b")),
        (None, 0, (None, 0)),
        (float("nan"), float("nan"), None),
        (np.float32(2), 3, (np.float32(2), 3)),
        (jnp.asarray(3), 3, None),
        (FrozenDict(a=1), {"a": 1}, None),
        ((1, 2), [1, 2], None),
        ({"a": []}, {"a": [1]}, {"a": {"length_mismatch": (0, 1)}}),
        (jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32), None),
        ([jnp.ones(2)], [3], [{"shape_mismatch": ((2,), ())}]),
    ],
)
def test_differences_of_leaves_and_containers_are_as_documented(tree1, tree2, expected):
    expected = dict(enumerate(expected)) if isinstance(expected, list) else expected
    assert pytree_diff(tree1, tree2) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "bool", "complex64"])
def test_the_difference_of_arrays_is_first_minus_second(dtype):
    difference = pytree_diff(jnp.array([0, 1], dtype), jnp.array([1, 1], dtype))
    np.testing.assert_array_equal(difference, [-1, 0])


def test_arrays_with_infinities_can_be_compared():
    x = np.array([np.inf, -np.inf, np.nan, 1.0])
    assert pytree_diff(x, x.copy()) is None
    assert pytree_diff(x, x + np.array([0, 0, 0, 1]))[3] == -1.0


def test_random_keys_are_compared_by_their_bits(key):
    assert pytree_diff(key, jax.random.key(0)) is None
    assert pytree_diff(key, jax.random.key(1)) is not None


def test_train_states_and_boxes_are_looked_into():
    def state(value, names):
        params = {"w": nn.Partitioned(jnp.full(2, value), names)}
        return TrainState.create(apply_fn=print, params=params, tx=optax.identity())

    first = state(1.0, ("tp",))
    assert pytree_diff(first, first.replace(step=first.step)) is None
    difference = pytree_diff(first, first.replace(params=state(2.0, ("tp",)).params))
    np.testing.assert_array_equal(difference["params"]["w"]["value"], [-1, -1])
    other_names = pytree_diff(first.params, state(1.0, ("dp",)).params)
    assert [box.names for box in other_names["w"]] == [("tp",), ("dp",)]


def test_trees_are_compared_down_to_twenty_levels():
    def nested(depth, leaf):
        return [nested(depth - 1, leaf)] if depth else leaf

    def innermost(difference):
        return innermost(difference[0]) if isinstance(difference, dict) else difference

    assert innermost(pytree_diff(nested(20, 1), nested(20, 2))) == (1, 2)
    assert innermost(pytree_diff(nested(21, 1), nested(21, 1))) == RecursionLimit()


def test_a_path_joins_keys_indices_and_attributes():
    tree = {"a": [0, {"b": nn.Partitioned(1, ("tp",))}], 3: TrainState}
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree["a"])]
    assert [pytree_key_path_to_str(path) for path in paths] == ["0", "1.b.value"]
    assert pytree_key_path_to_str(paths[1], separator="/") == "1/b/value"
    assert pytree_key_path_to_str(()) == ""


def test_a_flattened_tree_has_the_leaves_under_their_names():
    tree = {"a": [1, (2, 3)], "b": FrozenDict(c=4), "d": None}
    assert flatten_pytree(tree) == {"a.0": 1, "a.1.0": 2, "a.1.1": 3, "b.c": 4}
    assert flatten_pytree(tree, separator="/")["b/c"] == 4
    assert flatten_pytree({}) == {}


def test_boxes_can_be_kept_whole():
    assert "block.dense.kernel.value" in flatten_pytree(boxed_params())
    flat = flatten_pytree(boxed_params(), is_leaf=is_partitioned)
    assert is_partitioned(flat["block.dense.kernel"])


@pytest.mark.parametrize("flatten", [flatten_pytree, flatten_dict])
def test_two_leaves_of_one_name_are_an_error(flatten):
    tree = {"a.b": 1, "a": {"b": 2}}
    with pytest.raises(ValueError, match=r"named 'a\.b'"):
        flatten(tree)
    assert flatten(tree, separator="/") == {"a/b": 2, "a.b": 1}


def test_a_flattened_dictionary_keeps_everything_else_whole():
    box = nn.Partitioned(jnp.ones(2), ("tp",))
    flat = flatten_dict({"a": {"b": None, 1: [2, 3]}, "c": FrozenDict(d=box), "e": {}})
    assert list(flat) == ["a.b", "a.1", "c.d"]
    assert flat["a.b"] is None
    assert flat["a.1"] == [2, 3]
    assert flat["c.d"] is box


def test_only_dictionaries_can_be_flattened_as_such():
    with pytest.raises(AssertionError, match="got a list"):
        flatten_dict.__wrapped__([1])


def test_a_tree_of_shapes_has_shapes_dtypes_and_shardings(key):
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(jnp.ones((8, 2), jnp.bfloat16), NamedSharding(mesh, PartitionSpec("dp")))
    shapes = get_shape_dtype_pytree({"x": nn.Partitioned(sharded, ("dp", None)), "key": key, "n": 3, "h": np.ones(2)})
    box = shapes["x"]
    assert box.names == ("dp", None)
    assert (box.value.shape, box.value.dtype, box.value.sharding) == ((8, 2), jnp.bfloat16, sharded.sharding)
    assert shapes["key"].dtype == key.dtype
    assert shapes["n"] == 3
    assert isinstance(shapes["h"], np.ndarray)


def test_shapes_can_be_taken_while_tracing():
    seen = []
    jax.jit(lambda x: seen.append(get_shape_dtype_pytree(x)) or x)({"a": jnp.ones(3)})
    assert seen[0]["a"].shape == (3,)


def test_deleted_arrays_are_gone_and_other_leaves_stay():
    tree = {"x": jnp.ones(2), "box": nn.Partitioned(jnp.ones(2), ("tp",)), "h": np.ones(2), "n": None, "s": "text"}
    delete_arrays_in_pytree(tree)
    assert tree["x"].is_deleted()
    assert tree["box"].value.is_deleted()
    assert tree["h"].sum() == 2


def test_a_mask_excludes_what_a_pattern_finds():
    mask = get_param_mask_fn(["bias", r"norm\.scale$"])(boxed_params())
    assert mask == {
        "embed": {"kernel": True},
        "block": {"norm": {"scale": False}, "dense": {"kernel": True, "bias": False}},
    }


def test_a_mask_includes_only_what_a_pattern_finds():
    mask = get_param_mask_fn(None, include=[re.compile("KERNEL", re.IGNORECASE)])(boxed_params())
    assert flatten_dict(mask) == {
        "embed.kernel": True,
        "block.norm.scale": False,
        "block.dense.kernel": True,
        "block.dense.bias": False,
    }


def test_a_mask_without_patterns_is_true_everywhere():
    assert all(flatten_dict(get_param_mask_fn(None)(boxed_params())).values())
    assert all(flatten_dict(get_param_mask_fn([])(boxed_params())).values())
    assert not any(flatten_dict(get_param_mask_fn(None, include=[])(boxed_params())).values())


@pytest.mark.parametrize("exclude", [(), ["embed"]], ids=["nothing", "something"])
def test_a_mask_with_both_lists_is_what_is_included_and_not_excluded(exclude):
    assert flatten_dict(get_param_mask_fn(exclude, ["kernel"])(boxed_params())) == {
        "embed.kernel": not exclude,
        "block.norm.scale": False,
        "block.dense.kernel": True,
        "block.dense.bias": False,
    }


def test_a_mask_sees_no_boxes():
    mask = get_param_mask_fn(["value", "kernel$"])(boxed_params())
    assert flatten_dict(mask) == {
        "embed.kernel": False,
        "block.norm.scale": True,
        "block.dense.kernel": False,
        "block.dense.bias": True,
    }


def test_a_mask_of_boxed_parameters_steers_the_weight_decay_of_optax():
    params = boxed_params()
    decay = optax.add_decayed_weights(0.5, mask=get_param_mask_fn(["bias", "embed"]))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = jax.jit(decay.update)(zeros, decay.init(params), params)
    assert updates["block"]["dense"]["kernel"].names == (None, "tp")
    sums = {name: float(update.sum()) for name, update in flatten_pytree(updates).items()}
    assert sums == {
        "embed.kernel": 0.0,
        "block.norm.scale": 2.0,
        "block.dense.kernel.value": 4.0,
        "block.dense.bias": 0.0,
    }


def test_an_invalid_pattern_is_an_error_that_shows_it():
    with pytest.raises(ValueError, match=re.escape("'(kernel' is not a regular expression")):
        get_param_mask_fn(["bias", "(kernel"])


def test_a_single_string_is_not_taken_for_a_list_of_patterns():
    with pytest.raises(ValueError, match=re.escape("write ['bias']")):
        get_param_mask_fn("bias")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"step": 100_000}, {"step": 100_001}),
        ({"step": jnp.int32(100_000)}, {"step": jnp.int32(100_001)}),
        ({"eps": 1e-8}, {"eps": 5e-9}),
        (jax.random.key(4_000_000_000), jax.random.key(4_000_000_001)),
    ],
)
def test_only_the_rounding_of_arrays_is_forgiven(one, other):
    assert pytree_utils.pytree_diff(one, other) is not None
    assert pytree_utils.pytree_diff(one, one) is None
    assert pytree_utils.pytree_diff(jnp.ones(2), jnp.ones(2) * (1 + 1e-7)) is None
