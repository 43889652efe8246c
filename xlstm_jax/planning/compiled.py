"""Compile the training step of a run without running it, to measure the memory it needs."""

import jax
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.distributed.mesh_utils import initialize_mesh
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.setup import Setup
from xlstm_jax.trainer.base.compiled_step import CompiledMemory

__all__ = ["CompiledMemory", "compile_here"]


def compile_here(setup: Setup) -> CompiledMemory:
    """Compile the training step of a run for the devices of this process, without running it."""
    devices = jax.devices()[: setup.num_devices]
    mesh: Mesh = initialize_mesh(setup.model.parallel, np.array(devices))
    return CompiledMemory.of(AbstractTrainer.from_setup(setup, mesh).lower().compile(), devices[0].device_kind)
