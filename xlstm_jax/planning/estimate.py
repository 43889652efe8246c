"""Estimate of the step time from FLOPs, memory traffic and communication.

The parts are summed, as if nothing overlapped. Rates are those of data sheets times the shares in `Assumptions`.
"""

import dataclasses
import math
import time

import jax
import numpy as np

from xlstm_jax.models.cost import Flops, model_cost
from xlstm_jax.planning.communication import Communication
from xlstm_jax.planning.memory import PersistentMemory
from xlstm_jax.planning.setup import Setup
from xlstm_jax.trainer.base.run_metrics import measured_flops
from xlstm_jax.utils.accelerators import Accelerator, host_memory

CPU_COPY_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Assumed utilisation: the achieved shares of the data sheet's rates."""

    compute: float = 0.4
    """The share of peak FLOPs, for all executed FLOPs; element-wise operations and idle time lower it. On an H200 in
    bfloat16, with kernels in plain JAX, xLSTM-1.4B and a Llama of 0.4B reach 0.44 to 0.49, xLSTM-400M 0.19 to 0.26."""
    memory: float = 0.8
    """The share of memory bandwidth that the optimizer reaches."""
    links: float = 0.7
    """The share of the bandwidth between devices."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The parts of a step's time, in seconds."""

    compute: float
    optimizer: float
    communication: float

    @property
    def total(self) -> float:
        """The sum of all parts, without overlap."""
        return self.compute + self.optimizer + self.communication

    @property
    def overlapped(self) -> float:
        """The time if communication and computation overlap completely."""
        return max(self.compute, self.communication) + self.optimizer


def step_flops(setup: Setup) -> Flops:
    """Return the FLOPs of a step, summed over all devices; tensor parallelism splits them evenly."""
    num_minibatches = setup.batch_size // setup.rows * setup.accumulation
    cost = model_cost(setup.shape, sequence_length=setup.context_length, batch_size=setup.rows // setup.accumulation)
    return Flops(**{name: num_minibatches * flops for name, flops in dataclasses.asdict(cost.flops).items()})


def step_time(
    setup: Setup,
    memory: PersistentMemory,
    communication: Communication,
    accelerator: Accelerator,
    assumptions: Assumptions | None = None,
) -> StepTime:
    """Estimate the time of a training step.

    Args:
        setup: The run.
        memory: The persistent memory of a device: the optimizer reads and writes the state, and reads the gradients.
        communication: The bytes that a device sends.
        accelerator: The device.
        assumptions: The achieved shares of the device's rates.

    Returns:
        The parts of the step's time, in seconds.
    """
    shares = assumptions or Assumptions()
    traffic = 2 * (memory.parameters + memory.optimizer) + memory.parameters
    return StepTime(
        compute=step_flops(setup).executed
        / setup.num_devices
        / (accelerator.flops(setup.shape.dtype) * shares.compute),
        optimizer=traffic / (accelerator.memory_bandwidth * shares.memory),
        communication=math.fsum(
            volume / (_bandwidth(axes, setup.axis_sizes, accelerator) * shares.links)
            for axes, volume in communication.items()
        ),
    )


def measured_cpu(num_devices: int) -> Accelerator:
    """Measure the CPU of this machine; simulated devices each get an equal share."""
    source = np.ones(CPU_COPY_BYTES, np.uint8)
    target = source.copy()
    start = time.perf_counter()
    np.copyto(target, source)
    bandwidth = 2 * CPU_COPY_BYTES / (time.perf_counter() - start) / num_devices
    flops = measured_flops(jax.local_devices(backend="cpu")[0]) / num_devices
    return Accelerator("cpu", flops, flops, host_memory() / num_devices, bandwidth, bandwidth, bandwidth, num_devices)


def _bandwidth(axes: tuple[str, ...], sizes: dict[str, int], accelerator: Accelerator) -> float:
    """Return the bandwidth of the slowest link of a ring over some axes; the last axis has adjacent devices."""
    names = list(sizes)
    outermost = min(names.index(axis) for axis in axes)
    span = math.prod(list(sizes.values())[outermost:])
    is_within_node = span <= accelerator.devices_per_node
    return accelerator.link_bandwidth if is_within_node else accelerator.network_bandwidth
