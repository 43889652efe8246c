"""Pipeline parallelism: a stack of layers in stages, one stage on each device of a mesh axis."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import LazyRng
from jax import lax

from xlstm_jax.distributed.array_utils import axis_index, axis_size, fold_rng_over_axis


def execute_pipeline_step(
    module: nn.Module,
    state: jax.Array,
    input: jax.Array,  # noqa: A002 (documented name)
    *args,
    model_axis_name: str,
    **kwargs,
) -> tuple[jax.Array, jax.Array]:
    """Run this device's stage once, and send its output to the next stage.

    Args:
        module: This device's stage.
        state: The output of the previous stage, for all stages but the first.
        input: The next microbatch, for the first stage.
        *args: Further arguments of the module, the same in each step.
        model_axis_name: The mesh axis of the pipeline.
        **kwargs: Further keyword arguments of the module.

    Returns:
        The output of the previous stage in this step, and this stage's output if it is the last (zeros otherwise).
    """
    num_stages, stage = axis_size(model_axis_name), axis_index(model_axis_name)
    output = module(jnp.where(stage == 0, input, state), *args, **kwargs)
    if output.dtype != input.dtype:
        raise ValueError(
            f"A pipeline stage must keep the dtype {input.dtype} of its input, but returned {output.dtype}."
        )
    if output.shape != input.shape:
        raise ValueError(
            f"A pipeline stage must keep the shape of its input {input.shape}, but returned {output.shape}."
        )
    if num_stages == 1:
        return output, output
    next_state = lax.ppermute(output, model_axis_name, [(i, (i + 1) % num_stages) for i in range(num_stages)])
    return next_state, jnp.where(stage == num_stages - 1, output, jnp.zeros_like(output))


@jax.named_scope("pipeline")
def execute_pipeline(
    module: nn.Module, x: jax.Array, *args, num_microbatches: int, model_axis_name: str, **kwargs
) -> jax.Array:
    """Run a batch through all stages, microbatch by microbatch (GPipe).

    Filling the pipeline wastes one step for each stage but one, so more microbatches give a higher utilisation.

    Args:
        module: This device's stage; all stages have one structure and parameters of their own.
        x: The batch, the same on all stages.
        *args: Further arguments of the module, the same for each microbatch.
        num_microbatches: The number of microbatches; it must divide the batch.
        model_axis_name: The mesh axis of the pipeline.
        **kwargs: Further keyword arguments of the module.

    Returns:
        The output of the last stage on its device, zeros on the others: a `psum` over the axis replicates it.
    """
    batch_size = x.shape[0]
    if num_microbatches < 1 or batch_size % num_microbatches:
        raise ValueError(
            f"A batch of {batch_size} rows cannot be split into {num_microbatches} microbatches of one size."
        )
    microbatches = x.reshape(num_microbatches, batch_size // num_microbatches, *x.shape[1:])
    # While the pipeline fills and drains, idle stages run on real rows and discard the outputs. On dummy rows, a layer
    # could have an infinite derivative, and its product with a zero gradient is NaN.
    num_idle = axis_size(model_axis_name) - 1
    inputs = jnp.concatenate([microbatches, jnp.repeat(microbatches[:1], num_idle, axis=0)])

    def step(module, state, microbatch):
        _fold_rngs_over_stages(module, model_axis_name)
        return execute_pipeline_step(module, state, microbatch, *args, model_axis_name=model_axis_name, **kwargs)

    steps = nn.scan(
        step,
        variable_broadcast="params",
        variable_axes={"intermediates": 0},
        split_rngs={"params": False, nn.DenyList("params"): True},
    )
    _, outputs = steps(module, inputs[0], inputs)
    return outputs[num_idle:].reshape(x.shape)


def _fold_rngs_over_stages(module: nn.Module, axis_name: str) -> None:
    """Give each stage its own random keys, so that no stage repeats the draws of the previous one."""
    rngs: Any = module.scope and module.scope.rngs
    for name in rngs:
        if name != "params":
            rngs[name] = LazyRng.create(fold_rng_over_axis(rngs[name].as_jax_rng(), axis_name))


class PipelineModule(nn.Module):
    """One stage of a pipeline; a `ModelParallelismWrapper` over the axis gives each device its own stage.

    Attributes:
        model_axis_name: The mesh axis of the pipeline.
        num_microbatches: The number of microbatches.
        module_fn: Creates the layers of a stage.
    """

    model_axis_name: str
    num_microbatches: int
    module_fn: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, *args, **kwargs):
        """Run the batch through the pipeline."""
        return execute_pipeline(
            self.module_fn(),
            *args,
            num_microbatches=self.num_microbatches,
            model_axis_name=self.model_axis_name,
            **kwargs,
        )
