"""Statistics of activations, sown into the collection `intermediates` where a caller makes it mutable."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from xlstm_jax.utils.partitioned import unboxed

COLLECTION = "intermediates"


def sow_spread(module: nn.Module, **arrays: jax.Array) -> None:
    """Sow the standard deviation of each array as `<name>_std`, and its largest magnitude as `<name>_abs_max`."""
    for name, x in arrays.items():
        _sow(module, f"{name}_std", jnp.std, x)
        _sow(module, f"{name}_abs_max", lambda x: jnp.max(jnp.abs(x)), x)


def sow_mean(module: nn.Module, **arrays: jax.Array) -> None:
    """Sow the mean of each array under its name."""
    for name, x in arrays.items():
        _sow(module, name, jnp.mean, x)


def sow_gates(module: nn.Module, **preactivations: jax.Array) -> None:
    """Sow statistics of the pre-activations of gates, and the means of the biases of their layers.

    Args:
        module: The module; its child with the name of a gate is the layer of that gate.
        **preactivations: The pre-activations of each gate; sown are `max_<name>_preact`, `min_<name>_preact`,
            `mean_<name>_preact` and `<name>_bias`.
    """
    for name, x in preactivations.items():
        for statistic in ("max", "min", "mean"):
            _sow(module, f"{statistic}_{name}_preact", getattr(jnp, statistic), x)
        if module.is_mutable_collection(COLLECTION):
            _sow(module, f"{name}_bias", jnp.mean, unboxed(module.get_variable("params", name)["bias"]))


def _sow(module: nn.Module, name: str, statistic, x: jax.Array) -> None:
    """Sow a statistic, computed in float32 at least, if the collection is mutable."""
    if module.is_mutable_collection(COLLECTION):
        module.sow(COLLECTION, name, statistic(x.astype(jnp.promote_types(x.dtype, jnp.float32))))
