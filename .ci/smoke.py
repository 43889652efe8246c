"""Import every module and compare one sharded gradient with that of a single device; needs the core packages only."""

import importlib
import pkgutil

import xlstm_jax
from xlstm_jax.distributed.xla_utils import simulate_CPU_devices

simulate_CPU_devices(8)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from xlstm_jax.distributed.data_parallel import gather_params, shard_params, sync_gradients
from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh

modules = [module.name for module in pkgutil.walk_packages(xlstm_jax.__path__, "xlstm_jax.")]
for name in modules:
    importlib.import_module(name)
print(f"{len(modules)} modules imported.")


def loss(params: dict, inputs: jax.Array) -> jax.Array:
    """The mean square of a linear model's outputs."""
    return jnp.mean((inputs @ gather_params(params, "fsdp")["weights"]) ** 2)


def sharded_gradient(weights: jax.Array, inputs: jax.Array) -> jax.Array:
    """The gradient of the loss over all devices, with the weights split over `fsdp`; one device's program."""
    params = shard_params({"weights": weights}, "fsdp", min_weight_size=0)
    grads = sync_gradients(jax.grad(loss)(params, inputs), ("dp", "fsdp"))
    return gather_params(grads, "fsdp")["weights"]


mesh = initialize_mesh(ParallelConfig(data_axis_size=2, fsdp_axis_size=4))
weights, inputs = jnp.linspace(-1, 1, 12), jnp.sin(jnp.arange(16.0 * 12)).reshape(16, 12)
on_mesh = jax.shard_map(sharded_gradient, mesh=mesh, in_specs=(P(), P(("dp", "fsdp"))), out_specs=P(), check_vma=False)
np.testing.assert_allclose(
    jax.jit(on_mesh)(weights, inputs), jax.grad(loss)({"weights": weights}, inputs)["weights"], rtol=1e-5, atol=1e-6
)
print(f"The gradient on {mesh.size} devices is that of one.")
