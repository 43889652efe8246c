"""Layers split over a mesh axis, and copies of a module with parameters of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh, run_sharded, unboxed_tree
from tolerances import assert_close

from xlstm_jax.distributed import ModelParallelismWrapper, TPAsyncDense, TPDense, split_array_over_mesh, sync_gradients
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.distributed.tensor_parallel import scale_init, tp_dense

MESH = make_mesh(dp=2, tp=4)
X = jax.random.normal(jax.random.key(5), (3, 8))


def init(module, x=X, mesh=MESH):
    return run_sharded(lambda key: module.init(key, x)["params"], mesh, jax.random.key(0))


def split_inputs(x):
    return split_array_over_mesh(x, "tp", -1)


class Layer(nn.Module):
    """A tensor-parallel layer on inputs whose features are split over tp; the outputs are gathered."""

    mode: str
    is_async: bool = False

    @nn.compact
    def __call__(self, x):
        config = ParallelConfig(tp_async_dense=self.is_async)
        dense = functools.partial(nn.Dense, bias_init=nn.initializers.normal(1.0))
        y = tp_dense(config, dense, 12, self.mode, name="dense")(x if self.mode == "none" else split_inputs(x))
        return y if self.mode == "none" else gathered(y)


def gathered(y):
    try:
        return lax.all_gather(y, "tp", axis=-1, tiled=True)
    except NameError:
        return y


@pytest.mark.parametrize("is_async", [False, True], ids=["at once", "in rings"])
@pytest.mark.parametrize(
    ("mode", "kernel", "bias"),
    [("gather", (None, "tp"), ("tp",)), ("scatter", ("tp", None), None), ("none", None, None)],
)
def test_a_split_layer_names_the_axis_it_splits_and_computes_the_plain_layer(mode, kernel, bias, is_async):
    layer = Layer(mode, is_async)
    params = init(layer)
    dense = params["dense"]["module"]
    assert getattr(dense["kernel"], "names", None) == kernel
    assert getattr(dense["bias"], "names", None) == bias
    whole = unboxed_tree(params)
    assert whole["dense"]["module"]["kernel"].shape == (8, 12)
    specs = nn.get_partition_spec(params)
    y = on_mesh(lambda p, x: layer.apply({"params": p}, x), MESH, (specs, P()))(params, X)
    assert_close(y, X @ whole["dense"]["module"]["kernel"] + whole["dense"]["module"]["bias"])
    assert_close(layer.apply({"params": whole}, X), y)


@pytest.mark.parametrize("mode", ["gather", "scatter"])
def test_rings_and_meshes_leave_the_parameters_as_they_are(mode):
    expected = jax.jit(lambda key: Layer(mode).init(key, X)["params"])(jax.random.key(0))
    for is_async in (False, True):
        assert_close(unboxed_tree(init(Layer(mode, is_async))), unboxed_tree(expected))


def test_a_gathering_layer_can_take_inputs_that_are_whole_already():
    layer = TPDense(functools.partial(nn.Dense, 3), "tp", tp_mode="gather", skip_communication=True)
    params = init(layer)
    specs = nn.get_partition_spec(params)
    y = on_mesh(lambda p, x: gathered(layer.apply({"params": p}, x)), MESH, (specs, P()))(params, X)
    assert_close(y, X @ unboxed_tree(params)["module"]["kernel"])


def test_a_scattering_layer_without_communication_returns_parts_that_sum_up_with_one_bias():
    dense = functools.partial(nn.Dense, 12, bias_init=nn.initializers.normal(1.0))
    layer = TPDense(dense, "tp", tp_mode="scatter", skip_communication=True)

    def run(key, x):
        params = layer.init(key, split_inputs(x))["params"]
        return params, lax.psum(layer.apply({"params": params}, split_inputs(x)), "tp")

    params, y = run_sharded(run, MESH, jax.random.key(0), X)
    whole = unboxed_tree(params)["module"]
    assert_close(y, X @ whole["kernel"] + whole["bias"])


def test_the_initialiser_sees_the_whole_kernel_and_is_scaled():
    layer = TPDense(
        functools.partial(nn.Dense, 3),
        "tp",
        tp_mode="gather",
        skip_communication=True,
        kernel_init=lambda key, shape, dtype: jnp.full(shape, np.prod(shape), dtype),
        kernel_init_adjustment=0.5,
        dense_name="dense",
    )
    np.testing.assert_array_equal(unboxed_tree(init(layer))["dense"]["kernel"], np.full((8, 12), 48.0))
    assert scale_init(nn.initializers.ones, 3.0)(jax.random.key(0), (2,)).tolist() == [3.0, 3.0]


def test_a_kernel_with_several_output_axes_is_drawn_as_a_matrix():
    layer = TPDense(functools.partial(nn.DenseGeneral, features=(2, 6)), "tp", tp_mode="none")
    kernel = layer.init(jax.random.key(0), jnp.ones((1, 512)))["params"]["module"]["kernel"]
    np.testing.assert_allclose(np.std(kernel), 512**-0.5, rtol=0.05)


def test_the_bias_is_initialised_as_the_layer_says():
    layer = TPDense(lambda **kwargs: nn.Dense(3, bias_init=nn.initializers.ones, **kwargs), "tp", tp_mode="gather")
    assert init(layer)["module"]["bias"].value.tolist() == [1.0] * 12


def test_a_layer_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="kernel and a bias, not with scale"):
        TPDense(lambda **_: nn.RMSNorm(parent=None), "tp").init(jax.random.key(0), X)


def test_features_that_do_not_divide_over_the_devices_are_refused():
    with pytest.raises(ValueError, match="12 output features cannot be split over 8 devices"):
        init(Layer("gather"), mesh=make_mesh(tp=8))


@pytest.mark.parametrize("layer", [TPDense, TPAsyncDense])
def test_the_layers_keep_compute_and_parameter_precision_apart(layer):
    dense = functools.partial(nn.Dense, 3, dtype=jnp.bfloat16)
    module = layer(dense, "tp", tp_mode="gather")
    y, params = module.init_with_output(jax.random.key(0), X)
    assert y.dtype == jnp.bfloat16
    assert params["params"]["module"]["kernel"].dtype == jnp.float32


def wrapper(**kwargs):
    return ModelParallelismWrapper("tp", functools.partial(nn.Dense, 5), **kwargs)


def test_each_device_has_parameters_of_its_own_on_a_leading_axis():
    kernel = init(wrapper())["sharded"]["kernel"]
    assert kernel.names == ("tp", None, None)
    assert kernel.value.shape == (4, 8, 5)
    assert len(np.unique(np.asarray(kernel.value)[:, 0, 0])) == 4


def test_unsplit_keys_give_all_devices_the_same_parameters():
    kernel = np.asarray(init(wrapper(split_rngs=False))["sharded"]["kernel"].value)
    assert (kernel == kernel[:1]).all()


def test_the_leading_axis_is_there_without_a_mesh_too():
    params = wrapper().init(jax.random.key(0), X)["params"]
    assert params["sharded"]["kernel"].names == ("tp", None, None)
    assert params["sharded"]["kernel"].value.shape == (1, 8, 5)
    without_bias = wrapper(module_kwargs=FrozenDict({"use_bias": False}))
    assert without_bias.init(jax.random.key(0), X)["params"]["sharded"].keys() == {"kernel"}


@pytest.mark.parametrize("only", [None, 2])
def test_a_wrapped_module_gets_the_gradients_of_the_mean_over_devices(only):
    module = wrapper(mask_except_model_idx=only)

    def step(key, x):
        params = module.init(key, x)["params"]

        def loss(params):
            return jnp.mean(jnp.square(lax.psum(module.apply({"params": params}, x), "tp")))

        return params, sync_gradients(jax.grad(loss)(params), MESH.axis_names)

    params, gradients = jax.tree.map(np.asarray, run_sharded(step, MESH, jax.random.key(0), X))

    def loss_of_all(params):
        kernels, biases = params["sharded"]["kernel"].value, params["sharded"]["bias"].value
        return jnp.mean(jnp.square(jnp.sum(jnp.einsum("bi,nio->nbo", X, kernels) + biases[:, None], axis=0)))

    expected = jax.grad(loss_of_all)(params)
    if only is not None:
        masked = np.arange(4) != only
        for tree in (params, expected):
            for leaf in jax.tree.leaves(tree):
                leaf_of_others = np.array(leaf)[masked]
                assert (leaf_of_others == 0).all() == (tree is params)
        expected = jax.tree.map(lambda g: jnp.where(masked.reshape(-1, *[1] * (g.ndim - 1)), 0, g), expected)
    assert_close(gradients, expected)
