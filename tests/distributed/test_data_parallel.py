"""Parameters split over devices, and gradients averaged over them."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh, run_sharded, unboxed_tree
from tolerances import assert_close

from xlstm_jax.distributed import shard_module_params, sync_gradients
from xlstm_jax.distributed.data_parallel import gather_array_with_mean_grads, gather_params, shard_params

MESH = make_mesh(dp=2, fsdp=4)


def shard(params, min_weight_size=0, mesh=MESH):
    return run_sharded(lambda p: shard_params(p, "fsdp", min_weight_size), mesh, params)


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((4, 16), (None, "fsdp")),
        ((16, 4), ("fsdp", None)),
        ((8, 8), (None, "fsdp")),
        ((4, 18), ("fsdp", None)),
        ((2, 3, 20), (None, None, "fsdp")),
    ],
    ids=str,
)
def test_the_largest_dimension_that_divides_is_split(shape, names):
    x = jnp.arange(np.prod(shape)).reshape(shape)
    sharded = shard({"w": x})["w"]
    assert sharded.names == names
    np.testing.assert_array_equal(sharded.value, x)


def test_a_parameter_with_at_most_the_minimal_number_of_elements_stays_replicated():
    sharded = shard({"small": jnp.zeros((4, 4)), "large": jnp.zeros((4, 5))}, min_weight_size=16)
    assert isinstance(sharded["small"], jax.Array)
    assert sharded["large"].names == ("fsdp", None)


def test_a_parameter_that_divides_nowhere_is_replicated_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert isinstance(shard({"w": jnp.zeros((3, 5))})["w"], jax.Array)
    assert "(3, 5)" in caplog.text


def test_a_dimension_split_over_another_axis_is_left_alone():
    mesh = make_mesh(fsdp=4, tp=2)
    sharded = run_sharded(
        lambda x: shard_params({"w": nn.Partitioned(x, (None, "tp"))}, "fsdp", 0), mesh, jnp.zeros((4, 8))
    )
    assert sharded["w"].names == ("fsdp", "tp")


def test_a_parameter_split_already_is_left_alone_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        twice = run_sharded(lambda x: shard_params(shard_params(x, "fsdp", 0), "fsdp", 0), MESH, jnp.zeros((4, 16)))
    assert twice.names == (None, "fsdp")
    assert "already" in caplog.text


def test_gathering_inverts_splitting():
    params = {"w": jnp.arange(64.0).reshape(4, 16), "b": jnp.arange(3.0)}
    back = on_mesh(lambda p: gather_params(shard_params(p, "fsdp", 0), "fsdp"), MESH)(params)
    assert_close(back, params)


def test_parameters_are_boxed_on_an_axis_of_one_device_and_not_outside_of_a_mesh():
    x = jnp.arange(64.0).reshape(4, 16)
    boxed = shard({"w": x, "small": jnp.zeros(3)}, min_weight_size=3, mesh=make_mesh(dp=8))
    assert boxed["w"].names == (None, "fsdp")
    np.testing.assert_array_equal(boxed["w"].value, x)
    assert isinstance(boxed["small"], jax.Array)
    assert shard_params(x, "fsdp", 0) is x


def test_the_boxes_of_a_module_do_not_depend_on_the_number_of_devices():
    module = shard_module_params(nn.Dense, "fsdp", 0)(8)

    def init(key):
        params = module.init(key, jnp.ones((2, 4)))
        return params, module.apply(params, jnp.ones((2, 4)))

    meshes = [make_mesh(fsdp=4), make_mesh(dp=4)]
    (four, y_four), (one, y_one) = [
        jax.tree.map(np.asarray, run_sharded(init, mesh, jax.random.key(0))) for mesh in meshes
    ]
    assert jax.tree.structure(one) == jax.tree.structure(four)
    assert_close(one, four)
    assert_close(y_one, y_four)


def test_the_gathered_axis_may_be_counted_from_the_end():
    x = jnp.arange(8.0).reshape(2, 4)
    gradient = jax.grad(lambda x: jnp.sum(gather_array_with_mean_grads(x, -1, "fsdp") ** 2))
    assert_close(on_mesh(gradient, MESH, P(None, "fsdp"), P(None, "fsdp"))(x), 2 * x)


def test_a_parameter_is_not_split_twice_over_joined_axes(caplog):
    def shard_twice(x):
        return shard_params(shard_params(x, "fsdp", 0), ("dp", "fsdp"), 0)

    assert run_sharded(shard_twice, MESH, jnp.zeros((16, 8))).names == ("fsdp", None)
    assert "already" in caplog.text


@pytest.mark.parametrize("scatter_dtype", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("gather_dtype", [None, "bfloat16"])
def test_gathering_and_its_gradient_use_the_precision_asked_for(gather_dtype, scatter_dtype):
    x = jax.random.normal(jax.random.key(0), (8, 4))
    cotangent = jax.random.normal(jax.random.key(1), (4, 8, 4))

    def both(x, cotangent):
        gather = functools.partial(
            gather_array_with_mean_grads,
            axis=0,
            axis_name="fsdp",
            gather_dtype=gather_dtype,
            grad_scatter_dtype=scatter_dtype,
        )
        whole, vjp = jax.vjp(gather, x)
        return whole, vjp(cotangent[0].astype(whole.dtype))[0]

    whole, gradient = on_mesh(both, MESH, (P("fsdp"), P("fsdp")), (P(), P("fsdp")))(x, cotangent)
    assert whole.dtype == jnp.dtype(gather_dtype or "float32")
    assert gradient.dtype == x.dtype
    lossy = "bfloat16" in (gather_dtype, scatter_dtype)
    assert_close(whole.astype(jnp.float32), x, dtype=gather_dtype or "float32")
    assert_close(gradient, cotangent.mean(0), dtype="bfloat16" if lossy else "float32")
    is_exact = np.allclose(gradient, cotangent.mean(0), rtol=1e-6, atol=1e-6)
    assert is_exact != lossy


def test_a_wrapped_module_keeps_the_names_of_its_parameters():
    class Two(nn.Module):
        wrap: bool

        @nn.compact
        def __call__(self, x):
            dense = functools.partial(nn.Dense, 8)
            return (shard_module_params(dense, "fsdp", 0) if self.wrap else dense)()(x)

    x = jnp.ones((2, 4))
    params = [run_sharded(lambda key, w=w: Two(w).init(key, x), MESH, jax.random.key(0)) for w in (True, False)]
    assert params[0]["params"]["Dense_0"]["kernel"].names == (None, "fsdp")
    assert_close(*map(unboxed_tree, params))


def test_gradients_are_averaged_over_the_axes_a_leaf_is_not_split_over():
    mesh = make_mesh(dp=2, fsdp=2, tp=2)

    def sync(x):
        leaf = x.reshape(())
        tree = {
            "plain": leaf,
            "fsdp": nn.Partitioned(leaf[None], ("fsdp",)),
            "both": nn.Partitioned(leaf[None, None], ("tp", "fsdp")),
            "joint": nn.Partitioned(leaf[None], (("dp", "tp"),)),
        }
        return sync_gradients(tree, ("dp", "fsdp", "pp", "tp"))

    assert_close(on_mesh(lambda x: sync_gradients(x, "dp"), MESH, P("dp"), P("dp"))(jnp.arange(2.0)), jnp.full(2, 0.5))
    x = jnp.arange(8.0)
    synced = run_sharded(sync, mesh, x, in_specs=P(("dp", "fsdp", "tp")))
    cube = np.arange(8.0).reshape(2, 2, 2)
    assert_close(synced["plain"], cube.mean())
    assert_close(synced["fsdp"].value, cube.mean((0, 2)))
    assert_close(synced["both"].value, cube.mean(0).T)
    assert_close(synced["joint"].value, cube.mean(1).reshape(-1))
