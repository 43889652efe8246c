"""The plan of a run: parameters, memory, FLOPs, time and the place of every parameter.

Memory between steps is exact. What a step needs beside it is known in one of three ways. A step that was compiled for
the device itself takes what its compiler says. For another accelerator, `footprint` estimates it, within 5 % of what
was measured on an H200. For a CPU there are the compiled step and, if nothing was compiled, a lower bound that is read
off the traced step: gradients, activations that are saved, and logits.
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
    """What a run needs, in plain values."""

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
    """Bytes of the gradients on a device: they lie where the parameters lie."""
    activations: int
    """Bytes that the forward pass of a minibatch saves for the backward pass, kept logits included."""
    logits: int
    """Bytes of the logits that the loss holds at once."""
    compiled: CompiledMemory | None
    """What the compiled step needs; `None` if nothing was compiled."""
    flops: Flops
    """Of a step, over all devices."""
    communication: dict[str, float]
    """Bytes that a device sends in a step, by mesh axes joined with `+`."""
    accelerator: Accelerator
    assumptions: Assumptions
    time: StepTime
    """Of a step."""
    num_steps: int | None
    parameters: tuple[Parameter, ...]
    estimated: int | None = None
    """Bytes that the step needs by the formula for accelerators; `None` for a CPU."""
    performance: str | None = None
    """What `performance: auto` has chosen, and why."""

    @property
    def traced_temporaries(self) -> int:
        """The lower estimate of what lives within a step; minibatches have their gradients beside their sum."""
        num_gradients = 1 if self.accumulation == 1 else 2
        return num_gradients * self.gradients + self.activations + 2 * self.logits

    @property
    def memory(self) -> int:
        """The bytes that a device needs, from the best source there is."""
        if self.compiled is not None and (self.estimated is None or self.compiled.device_kind != "cpu"):
            return self.compiled.peak
        return self.persistent.total + self.traced_temporaries if self.estimated is None else self.estimated

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a batch."""
        return self.batch_size * self.context_length

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second, over all devices."""
        return self.tokens_per_step / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation by the FLOPs that every implementation has to compute, as runs log it."""
        return self.flops.model / self.time.total / self.num_devices / self.accelerator.bfloat16_flops

    @property
    def mfu_6n(self) -> float:
        """The same by six FLOPs for each parameter and token."""
        flops = 6 * self.num_parameters * self.tokens_per_second
        return flops / self.num_devices / self.accelerator.bfloat16_flops

    @property
    def seconds(self) -> float | None:
        """The time of the whole run, without validation and checkpoints."""
        return None if self.num_steps is None else self.num_steps * self.time.total

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, also those that follow from others, in values that JSON can hold."""
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
    """Return the accelerator of a name; `cpu` is the one of this machine, which all devices share."""
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
        accelerator: The device to plan for, or its name; `cpu` is this machine's, measured.
        compiles: Whether to compile the training step, which says how much memory it needs.
        num_steps: How long the run is.
        assumptions: Which shares of the device's rates are reached.
        performance: What was chosen for the run, to be shown.

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
    """Return the bytes that a minibatch saves on an accelerator, and those of the logits that the loss holds."""
    memory = activation_memory(setup.shape, placement_of(setup, accelerator))
    return memory.saved + memory.kept_logits, memory.logits_chunk


def _traced_activations(setup: Setup, trainer: AbstractTrainer) -> tuple[int, int]:
    """Return the same for the loss as traced on this machine, where attention and cells are plain JAX."""
    minibatch_tokens = setup.rows // setup.accumulation * setup.context_length
    return kept_activations(trainer), logits_memory(trainer, minibatch_tokens)
