"""The memory of a compiled training step, as its compiler plans it."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.distributed.mesh_utils import initialize_mesh
from xlstm_jax.trainer.planning.abstract import AbstractTrainer
from xlstm_jax.trainer.planning.setup import Setup


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """Bytes on a device that a compiled training step needs."""

    device_kind: str
    """What it was compiled for. On `cpu`, the compiler computes in float32 what a model asks for in bfloat16, and keeps
    much of it so: for another device, the temporaries are then an estimate, and rather too high."""
    arguments: int
    """State, batch and metrics, without arrays that the step does not read."""
    outputs: int
    """Results that are written to no argument."""
    temporaries: int
    """Gradients, activations, gathered parameters, logits and all else that lives within a step."""
    code: int

    @property
    def peak(self) -> int:
        """All that is needed at once."""
        return self.arguments + self.outputs + self.temporaries + self.code


def compile_here(setup: Setup) -> CompiledMemory:
    """Compile the training step of a run for the devices of this process, and run nothing."""
    devices = jax.devices()[: setup.num_devices]
    mesh: Mesh = initialize_mesh(setup.model.parallel, np.array(devices))
    statistics = AbstractTrainer.from_setup(setup, mesh).lower().compile().memory_analysis()
    if statistics is None:
        raise RuntimeError(f"The compiler for {devices[0].device_kind!r} does not say how much memory a program needs.")
    return CompiledMemory(
        device_kind=devices[0].device_kind,
        arguments=statistics.argument_size_in_bytes,
        outputs=statistics.output_size_in_bytes - statistics.alias_size_in_bytes,
        temporaries=statistics.temp_size_in_bytes,
        code=statistics.generated_code_size_in_bytes,
    )
