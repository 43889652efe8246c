"""Small train states of real models on meshes, with values that mean nothing, and a comparison bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh
from models.runs import PARALLEL

from xlstm_jax.common_types import TrainState
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig, build_optimizer
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig
from xlstm_jax.utils.partitioned import is_partitioned, reboxed, unboxed

CONFIG = XLSTMConfig(vocab_size=32, embedding_dim=16, num_heads=2, num_blocks=2, chunk_size=8, parallel=PARALLEL)
UNROLLED = dataclasses.replace(CONFIG, scan_blocks=False)
MIXED = dataclasses.replace(CONFIG, num_blocks=4, block_kinds=["mlstm", "slstm"] * 2)
MIXED_UNROLLED = dataclasses.replace(MIXED, scan_blocks=False)
ADAMW = OptimizerConfig(name="adamw", scheduler=SchedulerConfig(lr=0.01), weight_decay=0.1, grad_clip_norm=1.0)


def make_state(seed=0, config=CONFIG, optimizer=ADAMW, **mesh_sizes):
    """Fill a state with noise, laid out over a mesh as the model and the optimizer want it."""
    mesh, model, (tx, _) = make_mesh(**mesh_sizes), XLSTM(config), build_optimizer(optimizer)

    def init(key):
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx, rng=jax.random.key(0))

    def shapes(out_specs):
        program = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False)
        return jax.eval_shape(program, jax.random.key(0))

    generator = np.random.default_rng(seed)

    def draw(shape, sharding):
        if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
            return jax.jit(lambda: jax.random.key(seed), out_shardings=sharding)()
        if shape.weak_type:
            return jax.device_put(int(generator.integers(100)), sharding)
        return jax.device_put((10 * generator.normal(size=shape.shape)).astype(shape.dtype), sharding)

    def fill(leaf, spec):
        return reboxed(leaf, draw(unboxed(leaf), NamedSharding(mesh, spec)))

    specs = nn.get_partition_spec(shapes(P()))
    return jax.tree.map(fill, shapes(specs), specs, is_leaf=is_partitioned)


def parts(state):
    """Return what is stored of a state."""
    return {name: getattr(state, name) for name in ("step", "params", "opt_state", "rng")}


def host(tree):
    """Fetch all arrays of a tree, without boxes; random keys as their data."""

    def fetch(leaf):
        leaf = unboxed(leaf)
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return jax.tree.map(fetch, tree, is_leaf=is_partitioned)


def assert_same(actual, expected):
    """Compare the values of two trees bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, host(actual), host(expected))


def assert_laid_out_alike(actual, expected):
    """Compare the structure, boxes, dtypes and places of two trees."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)

    def compare(x, y):
        assert (x.dtype, x.sharding, x.committed) == (y.dtype, y.sharding, y.committed)
        assert getattr(x, "weak_type", None) == getattr(y, "weak_type", None)

    jax.tree.map(compare, actual, expected)
