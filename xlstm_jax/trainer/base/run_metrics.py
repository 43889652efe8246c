"""Metrics that every run reports: throughput, utilisation, memory, and where the time goes."""

import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xlstm_jax.models.cost import model_cost
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.trainer.base.steps import BAD_STEPS
from xlstm_jax.trainer.run.clock import Clock
from xlstm_jax.trainer.run.progress import Progress
from xlstm_jax.utils.accelerators import of_device_kind

LOGGER = logging.getLogger(__name__)

MEASURED_SIZE = 512
GIB = 2**30


class RunMonitor:
    """Counts tokens and computes the metrics of the run for each row of the log.

    Args:
        clock: Measures where the time goes.
        progress: Counts the tokens.
        model_config: The shape of the model; the utilisation is known for `XLSTMConfig` and `LlamaConfig`.
        num_devices: The devices of the mesh.

    Attributes:
        num_bad: Bad steps so far, as of the last row.
        data_wait: Seconds that the host has waited for batches since the last row.
        data_statistics: Returns the statistics of the train loader.
    """

    def __init__(self, clock: Clock, progress: Progress, model_config: Any, num_devices: int):
        self.clock = clock
        self.progress = progress
        self.model_config = model_config
        self.num_devices = num_devices
        self.num_bad = 0
        self.data_wait = 0.0
        self.data_statistics: Callable[[], Mapping[str, float]] = dict
        self._sequence_length = 0
        self._last = (0, 0)
        self._last_seconds = clock.seconds

    def start(self, step: int) -> None:
        """Start counting at a step."""
        self._last = (step, self.progress.tokens_seen)
        self._last_seconds = self.clock.seconds
        self.data_wait = 0.0

    def count(self, inputs: Any) -> None:
        """Count the inputs of a step."""
        if hasattr(inputs, "shape"):
            self.progress.tokens_seen += inputs.size
            self._sequence_length = inputs.shape[1] if inputs.ndim == 2 else 0

    def __call__(self, row: dict[str, Any], step: int) -> Mapping[str, Any]:
        """Compute the metrics of a row."""
        last_step, last_tokens = self._last
        num_steps, num_tokens = step - last_step, self.progress.tokens_seen - last_tokens
        seconds = self.clock.seconds
        self.num_bad = int(row.pop(f"{BAD_STEPS}_single", 0))
        numbers: dict[str, Any] = {
            "tokens_seen": self.progress.tokens_seen,
            "data_wait_time": self.data_wait / max(num_steps, 1),
            "compile_time": self.clock.seconds["compile"],
            **{f"{name}_time": seconds[name] - self._last_seconds[name] for name in ("checkpoint", "evaluation")},
            BAD_STEPS: self.num_bad,
        }
        if "step_time" in row and num_steps:
            rate = num_tokens / (num_steps * row["step_time"])
            numbers["tokens_per_second"] = rate
            if flops := mfu_flops(self.model_config, self._sequence_length):
                peak = peak_flops(self.num_devices)
                numbers |= {name: rate * per_token / peak for name, per_token in flops.items()}
        numbers["device_memory_gib"] = device_memory() / GIB
        numbers |= {f"data_{name}": value for name, value in self.data_statistics().items()}
        self.start(step)
        return numbers | self.clock.shares()


def mfu_flops(model_config: Any, sequence_length: int) -> dict[str, float]:
    """Return the FLOPs of a token by definition of model FLOPs utilisation; empty without a FLOP model.

    `mfu`, the default definition: the FLOPs that every implementation of the model needs (see `models.cost.Flops`), so
    embedding lookups are free and the cost of attention depends on the sequence length. `mfu_6n`: six per parameter,
    embedding table included, as in many papers.
    """
    flops = flops_per_token(model_config, sequence_length)
    if not flops:
        return {}
    return {"mfu": flops, "mfu_6n": 6.0 * model_cost(model_config, sequence_length=sequence_length).parameters}


def flops_per_token(model_config: Any, sequence_length: int) -> float:
    """Return the FLOPs of a token in training; 0 for models that are not ours."""
    if not isinstance(model_config, LanguageModelConfig) or sequence_length < 2:
        return 0.0
    return model_cost(model_config, sequence_length=sequence_length).flops_per_token.model


def device_memory() -> int:
    """Return the peak memory in bytes of the devices of this process; on a CPU, of the process."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    return max(peaks) or _process_memory()


def peak_flops(num_devices: int) -> float:
    """Return the peak FLOPs per second of the devices; unknown devices are measured once."""
    kind = jax.devices()[0].device_kind
    accelerator = of_device_kind(kind)
    if accelerator is not None:
        return accelerator.bfloat16_flops * num_devices
    # Simulated devices share one CPU.
    return measured_flops(jax.local_devices()[0]) * (1 if jax.default_backend() == "cpu" else num_devices)


@functools.cache
def measured_flops(device: Any) -> float:
    """Return the FLOPs per second of a few matmuls on a device."""
    size = MEASURED_SIZE
    x = jax.device_put(jnp.ones((size, size)), device)
    product = jax.jit(jnp.matmul)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        times.append(time.perf_counter() - start)
    rate = 2 * size**3 / min(times)
    LOGGER.info("The peak of this device is in no table: matrix products reach %.3g FLOPs a second.", rate)
    return rate


def _process_memory() -> int:
    """Return the peak resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            sizes = [line.split()[1] for line in status if line.startswith("VmHWM:")]
    except OSError:
        return 0
    return int(sizes[0]) * 1024 if sizes else 0
