"""The convention of the project: gradients are those of the mean of all devices' losses, on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import BATCH, EXACT, MESHES, make_mesh, run_sharded, unboxed_tree
from tolerances import assert_close

from xlstm_jax.distributed import TPAsyncDense, TPDense, shard_module_params, split_array_over_mesh, sync_gradients
from xlstm_jax.distributed.array_utils import axis_size

pytestmark = pytest.mark.slow

FEATURES, HIDDEN, ROWS = 16, 32, 16

DENSE = {
    "plain": TPDense,
    "ring": functools.partial(TPAsyncDense, use_bidirectional_gather=False),
    "both ways": functools.partial(TPAsyncDense, use_bidirectional_gather=True, use_bidirectional_scatter=True),
}


class Network(nn.Module):
    """A replicated layer, one split over fsdp, and a feed-forward layer split over tp with its inputs and outputs."""

    dense: str = "plain"
    gathers_output: bool = True

    @nn.compact
    def __call__(self, x):
        tp_size = axis_size("tp")
        tp_dense = functools.partial(DENSE[self.dense], model_axis_name="tp")
        x = nn.Dense(FEATURES, name="replicated")(x)
        x = x + shard_module_params(nn.Dense, "fsdp", min_weight_size=FEATURES)(FEATURES, name="split")(jnp.tanh(x))
        x = split_array_over_mesh(x, "tp", split_axis=-1)
        feed_forward = shard_module_params(FeedForward, "fsdp", min_weight_size=HIDDEN)
        x = x + feed_forward(tp_dense, tp_size, name="feed_forward")(x)
        if self.gathers_output and tp_size > 1:
            x = lax.all_gather(x, "tp", axis=-1, tiled=True)
        return x


class FeedForward(nn.Module):
    """Up with a column-parallel layer, down with a row-parallel one."""

    dense: functools.partial
    tp_size: int

    @nn.compact
    def __call__(self, x):
        hidden = self.dense(functools.partial(nn.Dense, HIDDEN // self.tp_size), tp_mode="gather", name="up")(x)
        features = FEATURES if self.dense.func is TPDense else FEATURES // self.tp_size
        down = functools.partial(nn.Dense, features, bias_init=nn.initializers.normal(1.0))
        return self.dense(down, tp_mode="scatter", name="down")(jnp.tanh(hidden))


def data():
    generator = np.random.default_rng(0)
    return tuple(jnp.asarray(generator.normal(size=(ROWS, FEATURES)), jnp.float32) for _ in range(2))


def loss(network, params, x, y):
    """Mean over what this device has of the output: all features, or its slice of them."""
    if not network.gathers_output:
        y = split_array_over_mesh(y, "tp", split_axis=-1)
    return jnp.mean(jnp.square(network.apply({"params": params}, x) - y))


@functools.cache
def on_one_device():
    network, (x, y) = Network(), data()
    params = jax.jit(lambda key: network.init(key, x)["params"], compiler_options=EXACT)(jax.random.key(3))
    return jax.device_get((params, jax.jit(jax.grad(functools.partial(loss, network)))(params, x, y)))


@functools.cache
def parameters_on(mesh_name):
    x, _ = data()
    mesh = make_mesh(**MESHES[mesh_name])
    initialise = lambda key: Network().init(key, x)["params"]  # noqa: E731
    return unboxed_tree(run_sharded(initialise, mesh, jax.random.key(3), compiler_options=EXACT))


@pytest.mark.parametrize("mesh_name", MESHES)
def test_a_seed_gives_the_same_parameters_bit_for_bit_on_every_mesh(mesh_name):
    jax.tree.map(np.testing.assert_array_equal, parameters_on(mesh_name), parameters_on("dp8"))


def test_a_seed_gives_the_same_parameters_to_an_ulp_without_a_mesh():
    expected, _ = on_one_device()
    jax.tree.map(lambda a, b: np.testing.assert_array_max_ulp(a, b, maxulp=1), parameters_on("dp8"), expected)


OF_TP = [name for name in MESHES if "tp" in name]
# Without tp there is nothing to gather; each ring meets each mesh with tp, and each of both either loss.
CASES = [
    *(("plain", name, gathers) for name in MESHES for gathers in ((True, False) if name in OF_TP else (True,))),
    *(("ring", name, index % 2 == 0) for index, name in enumerate(OF_TP)),
    *(("both ways", name, index % 2 == 1) for index, name in enumerate(OF_TP)),
]


@pytest.mark.parametrize(("dense", "mesh_name", "gathers_output"), CASES)
def test_gradients_are_the_same_on_every_mesh(dense, mesh_name, gathers_output):
    network, (x, y), mesh = Network(dense, gathers_output), data(), make_mesh(**MESHES[mesh_name])

    def step(key, x, y):
        params = network.init(key, x)["params"]
        return params, sync_gradients(jax.grad(functools.partial(loss, network))(params, x, y), mesh.axis_names)

    params, gradients = run_sharded(step, mesh, jax.random.key(3), x, y, in_specs=(P(), BATCH, BATCH))
    expected_params, expected = on_one_device()
    assert_close(unboxed_tree(params), expected_params)
    assert_close(unboxed_tree(gradients), expected)
