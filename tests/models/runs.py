"""Run a model on a mesh, on one device, or without a mesh, and return whole parameters, gradients and losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import BATCH, EXACT, make_mesh, on_mesh, run_sharded, unboxed_tree

from xlstm_jax.distributed import sync_gradients
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.utils.partitioned import is_partitioned, reboxed

MODEL_MESHES = {
    "one device": {},
    "dp8": {"dp": 8},
    "fsdp8": {"fsdp": 8},
    "dp2-tp4": {"dp": 2, "tp": 4},
    "dp2-fsdp2-tp2": {"dp": 2, "fsdp": 2, "tp": 2},
}
PARALLEL = ParallelConfig(fsdp_modules=("Embed", "Block", "LMHead"), fsdp_min_weight_size=16)
ROWS, LENGTH = 8, 12


def tokens(vocab_size, rows=ROWS, length=LENGTH):
    """Draw tokens and targets."""
    generator = np.random.default_rng(0)
    return tuple(jnp.asarray(generator.integers(0, vocab_size, (rows, length)), jnp.int32) for _ in range(2))


def init(model, key):
    """Draw parameters."""
    return model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]


def shaken(params):
    """Add noise to every parameter: what starts at zero or one must matter too."""
    generator = np.random.default_rng(9)
    return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * generator.normal(size=x.shape), x.dtype), params)


def mean_loss(model, params, inputs, targets):
    """Return the mean loss of this device's rows."""
    losses, _ = model.apply({"params": params}, inputs, targets=targets)
    return jnp.mean(losses)


def parameters_on(model, mesh_name):
    """Return the initial parameters on a mesh, whole."""
    mesh = make_mesh(**MODEL_MESHES[mesh_name])
    return unboxed_tree(run_sharded(lambda key: init(model, key), mesh, jax.random.key(3), compiler_options=EXACT))


def place_on(model, mesh, whole_params):
    """Spread whole parameters over a mesh as the model wants them; return them in their boxes, and their specs."""
    boxes = jax.eval_shape(
        jax.shard_map(lambda key: init(model, key), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False),
        jax.random.key(3),
    )
    like = nn.get_partition_spec(boxes)
    params = jax.tree.map(reboxed, boxes, whole_params, is_leaf=is_partitioned)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), like, is_leaf=lambda x: isinstance(x, P))
    return jax.device_put(params, shardings), like


def train_on(model, mesh_name, whole_params, num_steps=5, learning_rate=0.5):
    """Take SGD steps from given whole parameters on a mesh; return the first gradients and all losses."""
    mesh = make_mesh(**MODEL_MESHES[mesh_name])
    axes = mesh.axis_names
    params, like = place_on(model, mesh, whole_params)

    def step(params, inputs, targets):
        loss, gradients = jax.value_and_grad(lambda p: mean_loss(model, p, inputs, targets))(params)
        gradients = sync_gradients(gradients, axes)
        params = jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients)
        return params, gradients, lax.pmean(loss, axes)

    run = on_mesh(step, mesh, (like, BATCH, BATCH), (like, like, P()))
    batch = jax.device_put(tokens(model.config.vocab_size), NamedSharding(mesh, BATCH))
    return _steps(run, params, batch, num_steps)


def train_without_mesh(model, params, num_steps=5, learning_rate=0.5):
    """Take the same steps without any mesh."""

    @jax.jit
    def step(params, inputs, targets):
        loss, gradients = jax.value_and_grad(lambda p: mean_loss(model, p, inputs, targets))(params)
        return optax.apply_updates(params, jax.tree.map(lambda g: -learning_rate * g, gradients)), gradients, loss

    return _steps(step, params, tokens(model.config.vocab_size), num_steps)


def _steps(step, params, batch, num_steps):
    losses, first = [], None
    for _ in range(num_steps):
        params, gradients, loss = step(params, *batch)
        first = unboxed_tree(gradients) if first is None else first
        losses.append(float(loss))
    return first, np.array(losses)


def with_config(model, **changes):
    """Return the model with some fields of its config changed."""
    return type(model)(dataclasses.replace(model.config, **changes))
