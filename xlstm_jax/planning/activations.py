"""Size of the activations that the forward pass saves for the backward pass, from the traced loss.

It depends on the remat policy and the dtypes of the model. A compiler may save slightly more or less, and adds the
working memory of a block.
"""

from typing import Any

import jax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.trainer.placement import on_mesh
from xlstm_jax.trainer.user_functions import gather_rows


def kept_activations(trainer: AbstractTrainer) -> int:
    """Return the bytes per device that a minibatch saves for the backward pass.

    Args:
        trainer: The trainer.

    Returns:
        The bytes, without parameters and batch themselves; gathered or cast copies of parameters are included.
    """
    sizes: list[int] = []

    def measure(state: TrainState, batch: Batch) -> None:
        rows = gather_rows(batch, trainer.axis_names)
        num_rows = rows.inputs.shape[0] // trainer.trainer_config.gradient_accumulate_steps
        minibatch = jax.tree.map(lambda x: x[:num_rows], rows)

        def loss(params: Any) -> jax.Array:
            return trainer.loss_function(
                params, state.apply_fn, minibatch, state.rng, mutable_variables=state.mutable_variables
            )[0]

        sizes.append(_new_bytes(jax.make_jaxpr(lambda params: jax.vjp(loss, params)[1])(state.params).jaxpr))

    in_specs = (trainer.state_partition_specs, trainer.batch_partition_specs)
    jax.eval_shape(on_mesh(measure, trainer.mesh, in_specs, P()), trainer.state, trainer.exmp_batch)
    return sizes[0]


def _new_bytes(jaxpr: Any) -> int:
    """Return the bytes of all outputs that are neither arguments nor constants."""
    old = {*jaxpr.invars, *jaxpr.constvars}
    new = {var for var in jaxpr.outvars if not isinstance(var, Literal) and var not in old}
    return sum(var.aval.size * var.aval.dtype.itemsize for var in new)
