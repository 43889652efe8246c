"""Counts, norms, masks and tables of parameters do not depend on the mesh."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import FrozenDict
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from meshes import AXES, make_mesh, on_mesh
from tolerances import assert_close

from xlstm_jax.common_types import TrainState
from xlstm_jax.trainer.base.param_utils import (
    get_grad_norms,
    get_num_params,
    get_param_mask_fn,
    get_param_norms,
    get_sharded_global_norm,
    get_sharded_norm_logits,
    is_partitioned,
    tabulate_params,
)
from xlstm_jax.utils.partitioned import unboxed
from xlstm_jax.utils.pytree_utils import flatten_pytree

pytestmark = pytest.mark.slow

MESH_SHAPES = [shape for shape in itertools.product([1, 2, 4, 8], repeat=4) if math.prod(shape) == 8]


def boxed_params(key):
    names_and_shapes = {
        "embed": {"kernel": ((), (5, 3))},
        "block": {
            "fsdp": (("fsdp", None), (8, 3)),
            "tp": ((None, "tp"), (3, 8)),
            "both": (("tp", None, "fsdp"), (8, 1, 8)),
            "joined": ((None, ("dp", "fsdp")), (2, 8)),
            "stage": (("pp",), (8,)),
            "all": ((("pp", "tp"), ("dp", "fsdp")), (8, 8)),
        },
    }
    keys = iter(jax.random.split(key, 7))

    def make(names_and_shape):
        names, shape = names_and_shape
        value = jax.random.normal(next(keys), shape)
        return nn.Partitioned(value, names) if names else value

    return jax.tree.map(make, names_and_shapes, is_leaf=lambda x: isinstance(x, tuple))


def on_every_device(function, mesh_shape, tree):
    """Run a function on the parts of a tree; each result has a leading axis over the devices."""
    mesh = make_mesh(**dict(zip(AXES, mesh_shape, strict=True)))
    stacked = on_mesh(
        lambda part: jax.tree.map(lambda x: jnp.asarray(x)[None], function(part)),
        mesh,
        in_specs=(nn.get_partition_spec(tree),),
        out_specs=PartitionSpec(AXES),
    )
    return stacked(tree)


@pytest.mark.parametrize("mesh_shape", MESH_SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_norms_are_those_of_the_whole_tree_on_every_mesh(mesh_shape, key):
    params = boxed_params(key)
    whole = jax.tree.map(unboxed, params, is_leaf=is_partitioned)
    norms = on_every_device(lambda part: get_grad_norms(part, return_per_param=True), mesh_shape, params)
    expected = {f"grad_norm_{name}": np.linalg.norm(np.ravel(leaf)) for name, leaf in flatten_pytree(whole).items()}
    expected["grad_norm"] = optax.tree.norm(whole)
    assert_close(norms, {name: np.full(8, norm) for name, norm in expected.items()})


def test_there_are_twenty_meshes_of_eight_devices():
    assert len(MESH_SHAPES) == 20


def test_norms_without_a_mesh_are_those_of_the_whole_tree(key):
    params = boxed_params(key)
    whole = jax.tree.map(unboxed, params, is_leaf=is_partitioned)
    total, each = get_sharded_global_norm(params)
    assert_close(total, optax.tree.norm(whole))
    assert_close(each, jax.tree.map(jnp.linalg.norm, jax.tree.map(jnp.ravel, whole)))
    assert_close(get_sharded_norm_logits(params["block"]["tp"]), np.square(each["block"]["tp"]))


def test_norms_are_named_after_what_they_measure(key):
    params = {"a": {"b": nn.Partitioned(jnp.full(4, 2.0), ("tp",))}, "c": [jnp.full(1, 3.0)]}
    assert get_grad_norms(params) == {"grad_norm": 5.0}
    assert get_param_norms(params) == {"param_norm": 5.0}
    assert get_param_norms(params, return_per_param=True) == {
        "param_norm": 5.0,
        "param_norm_a.b": 4.0,
        "param_norm_c.0": 3.0,
    }
    assert get_grad_norms({}, return_per_param=True) == {"grad_norm": 0.0}


def test_norms_of_half_precision_are_taken_in_float32():
    norms = get_param_norms({"x": jnp.full(4096, 16.0, jnp.float16), "y": jnp.full(2, 200.0, jnp.bfloat16)}, True)
    assert {norm.dtype.name for norm in norms.values()} == {"float32"}
    assert norms["param_norm_x"] == 1024.0


def test_parameters_are_counted_by_their_global_sizes(key):
    params = boxed_params(key)
    num_params = 15 + 24 + 24 + 64 + 16 + 8 + 64
    assert get_num_params(params) == num_params
    assert get_num_params(jax.eval_shape(lambda: params)) == num_params
    assert get_num_params({"n": 3, "none": None, "text": "x", "scalar": jnp.ones(()), "host": np.ones((2, 2))}) == 5
    for mesh_shape in [(1, 2, 2, 2), (8, 1, 1, 1)]:
        counted = on_every_device(get_num_params, mesh_shape, params)
        assert counted.tolist() == [num_params] * 8


NAMES = st.sampled_from(["kernel", "bias", "scale", "norm", "block_1", "block_10", "value", "a.b"])
LEAVES = st.booleans().map(lambda boxed: nn.Partitioned(np.ones(2), ("tp",)) if boxed else np.ones(2))
PARAMS = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=3),
    lambda children: st.dictionaries(NAMES, children, max_size=3),
    max_leaves=6,
)
PATTERNS = st.lists(st.sampled_from(["kernel", "bias$", r"block_1\.", "^norm", "[ks]", "value", "."]), max_size=3)


@given(PARAMS, PATTERNS, st.booleans(), st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_mask_follows_the_names_of_the_unboxed_tree(params, patterns, including, compiled):
    given_patterns = [re.compile(pattern) for pattern in patterns] if compiled else patterns
    mask_fn = get_param_mask_fn(None, given_patterns) if including else get_param_mask_fn(given_patterns)
    mask = mask_fn(params)
    plain = jax.tree.map(unboxed, params, is_leaf=is_partitioned)
    assert mask == mask_fn(plain)
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    names = [".".join(key.key for key in path) for path, _ in leaves]
    wanted = [any(re.search(pattern, name) for pattern in patterns) == including for name in names]
    assert jax.tree.leaves(mask) == wanted


@given(PARAMS, PATTERNS)
@settings(deadline=None, max_examples=50)
def test_include_and_exclude_divide_the_parameters(params, patterns):
    excluded = get_param_mask_fn(patterns)(params)
    included = get_param_mask_fn(None, include=patterns)(params)
    assert jax.tree.leaves(excluded) == [not leaf for leaf in jax.tree.leaves(included)]


def table_rows(table):
    """Return the cells of a table, one list a line."""
    lines = table.splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def example_params():
    placed = jax.device_put(jnp.ones((8, 2)), NamedSharding(make_mesh(dp=2, tp=4), PartitionSpec(("dp", "tp"))))
    return {
        "mlp": {
            "kernel": nn.Partitioned(jnp.ones((1000, 1200), jnp.bfloat16), (None, "tp")),
            "bias": jnp.ones(1200),
        },
        "embed": placed,
        "[bold]norm[/bold]": nn.Partitioned(np.ones(3, np.int8), (None,)),
    }


def test_a_table_shows_every_parameter_sorted_by_name():
    table = tabulate_params(example_params())
    assert table.splitlines()[:2] == ["Total number of global parameters: 1_201_219", ""]
    assert table_rows(table) == [
        ["Name", "Shape", "Count", "Dtype", "Sharding"],
        ["[bold]norm[/bold]", "(3,)", "3", "int8", "-"],
        ["embed", "(8, 2)", "16", "float32", "P(('dp', 'tp'), None)"],
        ["mlp.bias", "(1200,)", "1_200", "float32", "-"],
        ["mlp.kernel", "(1000, 1200)", "1_200_000", "bfloat16", "P(None, 'tp')"],
    ]


@pytest.mark.parametrize(
    "kwargs", [{"weight_decay_exclude": ["bias", re.compile("norm")]}, {"weight_decay_include": ["mlp.k", "^embed"]}]
)
def test_a_table_can_show_what_weight_decay_applies_to(kwargs):
    rows = table_rows(tabulate_params(example_params(), show_weight_decay=True, **kwargs))
    assert [row[-1] for row in rows] == ["Weight Decay", "False", "True", "False", "True"]


def test_train_states_frozen_dictionaries_and_shapes_have_the_same_table():
    params = {"a": nn.Partitioned(jnp.ones((2, 4)), (None, "tp")), "b": {"c": jnp.ones(3)}}
    table = tabulate_params(params)
    state = TrainState.create(apply_fn=print, params=params, tx=optax.sgd(0.1))
    shapes = jax.eval_shape(lambda: params)
    assert tabulate_params(state) == tabulate_params(FrozenDict(params)) == tabulate_params(shapes) == table


def test_a_table_is_sorted_by_whole_names_not_key_by_key():
    rows = table_rows(tabulate_params({"a": {"c": jnp.ones(1)}, "a-b": jnp.ones(1), "list": [jnp.ones(1)] * 2}))
    assert [row[0] for row in rows[1:]] == ["a-b", "a.c", "list.0", "list.1"]


@pytest.mark.parametrize("num_columns", ["40", "300"])
def test_a_table_is_readable_whatever_the_names_and_the_terminal(num_columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", num_columns)
    long_name = "_".join(f"part{i}" for i in range(60))
    box = nn.Partitioned(
        jax.ShapeDtypeStruct((12345,) * 5, jnp.float8_e4m3b11fnuz), (None, "fsdp", ("dp", "pp"), None, "tp")
    )
    table = tabulate_params({long_name: {"short": box}, "zero": jnp.ones(2)}, show_weight_decay=True)
    assert max(map(len, table.splitlines())) <= 120
    rows = table_rows(table)
    name, shape, count, dtype, sharding, _ = ("".join(column) for column in zip(*rows[1:-1], strict=True))
    assert name == f"{long_name}.short"
    assert shape.replace(" ", "") == str((12345,) * 5).replace(" ", "")
    assert count == f"{12345**5:_}"
    assert dtype == "float8_e4m3b11fnuz"
    assert sharding.replace(" ", "") == "P(None,'fsdp',('dp','pp'),None,'tp')"
    assert rows[-1][0] == "zero"


def test_an_empty_tree_has_an_empty_table():
    table = tabulate_params({})
    assert table.startswith("Total number of global parameters: 0\n\n")
    assert len(table_rows(table)) == 1


def test_norms_keep_boxes_out_of_the_result(key):
    _, each = get_sharded_global_norm(boxed_params(key))
    assert not any(map(is_partitioned, jax.tree.leaves(each, is_leaf=is_partitioned)))
