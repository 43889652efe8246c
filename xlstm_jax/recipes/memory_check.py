"""Reject runs whose state or batch cannot fit into memory, from shapes alone, before anything is allocated."""

import logging
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset import LLMBatch
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.models.cost import model_cost
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.planning.footprint import state_bytes
from xlstm_jax.recipes.performance import usable_memory
from xlstm_jax.recipes.run_config import RunConfig
from xlstm_jax.trainer.base.compiled_step import CompiledMemory
from xlstm_jax.utils.accelerators import host_memory

LOGGER = logging.getLogger(__name__)

GIB = 2**30
COPIES = 8
"""An upper bound on the values that an optimizer stores per parameter. If the parameters need less than 1/8 of the
memory, the state is not computed exactly."""


def check_memory(config: RunConfig, mesh: Mesh) -> None:
    """Raise if parameters, optimizer and batch alone need more memory than the devices have.

    Args:
        config: The run.
        mesh: The devices of the run. CPU devices of a process share the memory of the machine.

    Raises:
        ConfigError: The state or the batch does not fit; the message names the settings to change.
    """
    limit = _memory_of_device(mesh)
    if limit is None:
        return
    batch = LLMBatch.get_dtype_struct(config.batch_size, config.context_length)
    num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // mesh.size
    rule = f"more than the {limit / GIB:.1f} GiB of memory for each of {mesh.size} device(s)"
    if num_bytes > limit:
        raise ConfigError(
            f"batch_size={config.batch_size} with context_length={config.context_length} needs {num_bytes / GIB:,.1f} "
            f"GiB on each device for the tokens alone, {rule}: lower one of them."
        )
    shape: Any = config.model.model_config
    if not isinstance(shape, LanguageModelConfig):
        return
    parameters = _least_parameter_bytes(config.model, mesh)
    needed, what = parameters, "parameters alone"
    if limit >= parameters > limit / COPIES:
        needed, what = state_bytes(config.setup(mesh.size)).persistent, "parameters, optimizer and batch"
    if needed > limit:
        raise ConfigError(
            f"The model (model.embedding_dim={shape.embedding_dim}, model.num_blocks={shape.num_blocks}, "
            f"model.vocab_size={shape.vocab_size}) needs {needed / GIB:,.1f} GiB on each device for {what}, {rule}: "
            "make it smaller, or shard it over more devices with parallel=fsdp."
        )


def warn_of_step_memory(compiled: CompiledMemory, mesh: Mesh) -> None:
    """Log a warning if a compiled step needs more memory than CPU devices have: the run may swap or be killed.

    For an accelerator, the limit is enforced after compilation; the figure of the CPU compiler is only an estimate.
    """
    if mesh.local_devices[0].platform == "cpu" and compiled.peak > (limit := _memory_of_device(mesh) or math.inf):
        LOGGER.warning(
            "The compiled training step needs about %.1f GiB on each device, more than the %.1f GiB of memory for each "
            "of %d CPU device(s): the system may swap or kill the run. Lower batch_size or context_length, or set "
            "model.remat=full or trainer.gradient_accumulate_steps.",
            compiled.peak / GIB,
            limit / GIB,
            mesh.size,
        )


def _memory_of_device(mesh: Mesh) -> int | None:
    device = mesh.local_devices[0]
    return host_memory() // len(mesh.local_devices) if device.platform == "cpu" else usable_memory(device)


def _least_parameter_bytes(model: ModelConfig, mesh: Mesh) -> int:
    """Return a lower bound on the bytes of parameters per device: all of them sharded over every possible axis."""
    parallel, shape = model.parallel, cast(LanguageModelConfig, model.model_config)
    num_parts = mesh.shape[parallel.fsdp_axis_name] * mesh.shape[parallel.model_axis_name]
    num_parts *= mesh.shape[parallel.pipeline_axis_name]
    itemsize = jnp.dtype(shape.param_dtype).itemsize
    return model_cost(shape, sequence_length=2).parameters * itemsize // num_parts
