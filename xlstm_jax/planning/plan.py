"""The plan of a run: parameters, memory, FLOPs, time and the sharding of every parameter.

Memory between steps is exact. The additional memory of a step comes from one of three sources: the compiler's report,
if the step was compiled for the device itself; for another accelerator, the estimate of `footprint`, within 5 % of
measurements on an H200; for a CPU without a compiled step, a lower bound from the traced step: gradients, saved
activations and logits.
"""

import dataclasses
from typing import Any

from xlstm_jax.models.cost import Flops, model_cost
from xlstm_jax.models.memory import activation_memory
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.activations import kept_activations
from xlstm_jax.planning.communication import count_communication
from xlstm_jax.planning.compiled import CompiledMemory
from xlstm_jax.planning.estimate import Assumptions, StepTime, measured_cpu, step_flops, step_time
from xlstm_jax.planning.footprint import placement_of, step_memory
from xlstm_jax.planning.memory import (
    Parameter,
    PersistentMemory,
    list_parameters,
    logits_memory,
    persistent_memory,
)
from xlstm_jax.planning.setup import Setup
from xlstm_jax.planning.simulate import compiled_memory
from xlstm_jax.utils.accelerators import Accelerator, find_accelerator


@dataclasses.dataclass(frozen=True)
class Plan:
    """The needs of a run, as plain values."""

    model: str
    num_parameters: int
    num_devices: int
    axis_sizes: dict[str, int]
    batch_size: int
    context_length: int
    accumulation: int
    remat: str
    persistent: PersistentMemory
    gradients: int
    """Bytes of the gradients per device; they are sharded like the parameters."""
    activations: int
    """Bytes that the forward pass of a minibatch saves for the backward pass, kept logits included."""
    logits: int
    """Bytes of the logits that the loss holds at once."""
    compiled: CompiledMemory | None
    """The memory of the compiled step; `None` if nothing was compiled."""
    flops: Flops
    """FLOPs of a step, over all devices."""
    communication: dict[str, float]
    """Bytes that a device sends per step, by mesh axes joined with `+`."""
    accelerator: Accelerator
    assumptions: Assumptions
    time: StepTime
    """The time of a step."""
    num_steps: int | None
    parameters: tuple[Parameter, ...]
    estimated: int | None = None
    """Bytes that the step needs by the formula for accelerators; `None` for a CPU."""
    performance: str | None = None
    """The choice of `performance: auto`, and its reason."""

    @property
    def traced_temporaries(self) -> int:
        """A lower bound on the temporary memory of a step; accumulation needs a second copy of the gradients."""
        num_gradients = 1 if self.accumulation == 1 else 2
        return num_gradients * self.gradients + self.activations + 2 * self.logits

    @property
    def memory(self) -> int:
        """The bytes that a device needs, from the best available source."""
        if self.compiled is not None and (self.estimated is None or self.compiled.device_kind != "cpu"):
            return self.compiled.peak
        return self.persistent.total + self.traced_temporaries if self.estimated is None else self.estimated

    @property
    def tokens_per_step(self) -> int:
        """Tokens per batch."""
        return self.batch_size * self.context_length

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, over all devices."""
        return self.tokens_per_step / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation by the FLOPs that every implementation has to compute, as runs log it."""
        return self.flops.model / self.time.total / self.num_devices / self.accelerator.bfloat16_flops

    @property
    def mfu_6n(self) -> float:
        """Model FLOPs utilisation with six FLOPs per parameter and token."""
        flops = 6 * self.num_parameters * self.tokens_per_second
        return flops / self.num_devices / self.accelerator.bfloat16_flops

    @property
    def seconds(self) -> float | None:
        """The time of the whole run, without validation and checkpoints."""
        return None if self.num_steps is None else self.num_steps * self.time.total

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and derived numbers as values that JSON can represent."""
        derived = {
            "memory": self.memory,
            "traced_temporaries": self.traced_temporaries,
            "step_seconds": self.time.total,
            "step_seconds_overlapped": self.time.overlapped,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "mfu_6n": self.mfu_6n,
            "seconds": self.seconds,
        }
        return dataclasses.asdict(self) | derived


def resolve_accelerator(name: str, num_devices: int) -> Accelerator:
    """Return the accelerator with a name; `cpu` is the CPU of this machine, which all devices share."""
    return measured_cpu(num_devices) if name == "cpu" else find_accelerator(name)


def make_plan(
    setup: Setup,
    accelerator: str | Accelerator,
    *,
    compiles: bool = True,
    num_steps: int | None = None,
    assumptions: Assumptions | None = None,
    performance: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        setup: The run.
        accelerator: The device to plan for, or its name; `cpu` measures the CPU of this machine.
        compiles: Whether to compile the training step to get its memory.
        num_steps: The length of the run in steps.
        assumptions: The achieved shares of the device's rates.
        performance: The choice of `performance: auto` and its reason, to show in the plan.

    Returns:
        The plan.
    """
    if isinstance(accelerator, str):
        accelerator = resolve_accelerator(accelerator, setup.num_devices)
    assumptions = assumptions or Assumptions()
    trainer = AbstractTrainer.from_setup(setup)
    memory, communication = persistent_memory(trainer), count_communication(trainer.traced)
    has_formula = bool(accelerator.device_kinds)
    activations, logits = (
        _formula_activations(setup, accelerator) if has_formula else _traced_activations(setup, trainer)
    )
    return Plan(
        model=type(setup.shape).__name__.removesuffix("Config"),
        num_parameters=model_cost(setup.shape, sequence_length=setup.context_length).parameters,
        num_devices=setup.num_devices,
        axis_sizes=setup.axis_sizes,
        batch_size=setup.batch_size,
        context_length=setup.context_length,
        accumulation=setup.accumulation,
        remat=setup.shape.remat_of_blocks,
        persistent=memory,
        gradients=memory.parameters,
        activations=activations,
        logits=logits,
        compiled=compiled_memory(setup) if compiles else None,
        flops=step_flops(setup),
        communication={"+".join(axes): volume for axes, volume in communication.items()},
        accelerator=accelerator,
        assumptions=assumptions,
        time=step_time(setup, memory, communication, accelerator, assumptions),
        num_steps=num_steps,
        parameters=list_parameters(trainer),
        estimated=step_memory(setup, accelerator) if has_formula else None,
        performance=performance,
    )


def _formula_activations(setup: Setup, accelerator: Accelerator) -> tuple[int, int]:
    """Return the bytes of a minibatch's saved activations and of the loss's logits on an accelerator, by formula."""
    memory = activation_memory(setup.shape, placement_of(setup, accelerator))
    return memory.saved + memory.kept_logits, memory.logits_chunk


def _traced_activations(setup: Setup, trainer: AbstractTrainer) -> tuple[int, int]:
    """Return these bytes from the loss traced on this machine, where attention and cells are plain JAX."""
    minibatch_tokens = setup.rows // setup.accumulation * setup.context_length
    return kept_activations(trainer), logits_memory(trainer, minibatch_tokens)
