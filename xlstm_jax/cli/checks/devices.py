"""Check the devices of this process: each computes, and collectives work between them."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from xlstm_jax.cli.checks.section import FAILED, PASSED, Section, first_line
from xlstm_jax.cli.shared.gpu_check import gpu_problem
from xlstm_jax.cli.shared.gpu_memory import LARGEST_FRACTION, VARIABLE, current_fraction
from xlstm_jax.recipes.compilation_cache import describe_cache
from xlstm_jax.utils.accelerators import host_memory

REDUCED_BYTES = 2**24
"""The size of each device's operand in the timed all-reduce."""


def check_devices(title: str) -> Section:
    """Multiply matrices on every device of this process."""
    section = Section(title, ("device", "kind", "memory", "64 × 64 matmul, compiled and run"))
    try:
        devices = jax.local_devices()
    except Exception as error:
        section.problems.append(f"JAX does not start: {first_line(error)}")
        return section
    for device in devices:
        try:
            result = f"{_check_matmul(device):.2f} s"
        except Exception as error:
            result = first_line(error)
            section.problems.append(f"{device}: {result}")
        section.add(str(device), device.device_kind, _memory(device), result)
    if any(device.platform == "gpu" for device in devices):
        section.notes.append(
            f"JAX may use {current_fraction():.0%} of a GPU's memory; to change that, set {VARIABLE}, which commands "
            f"set to at most {LARGEST_FRACTION} where no variable configures JAX's memory."
        )
    section.notes.append(f"Compilation cache {describe_cache()}.")
    if problem := gpu_problem():
        section.notes.append(problem)
    return section


def _check_matmul(device: Any) -> float:
    """Multiply two matrices of small integers, which is exact in any precision; return the seconds it took."""
    left, right = np.arange(2 * 64 * 64).reshape(2, 64, 64) % 3.0
    start = time.perf_counter()
    product = jax.jit(lambda a, b: a @ b)(*jax.device_put((left, right), device))
    if not np.array_equal(product, left @ right):
        raise ArithmeticError("the product is wrong")
    return time.perf_counter() - start


def _memory(device: Any) -> str:
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return f"{stats.get('bytes_in_use', 0) / 2**30:.1f} of {stats['bytes_limit'] / 2**30:.1f} GiB used"
    if device.platform == "cpu":
        return f"{host_memory() / 2**30:.1f} GiB, the host's"
    return "-"


def check_collectives(title: str) -> Section:
    """Compare collectives with NumPy, over this process or, if it has joined a job, over all processes of the job."""
    section = Section(title, ("collective", "result"))
    devices = jax.devices() if jax.distributed.is_initialized() else jax.local_devices()
    if len(devices) == 1:
        section.notes.append("There is one device, so there is nothing to test.")
        return section
    mesh = Mesh(np.array(devices), ("all",))
    num_processes = len({device.process_index for device in devices})
    sizes = f"{len(devices)} devices in {num_processes} process{'es' * (num_processes > 1)}"
    section.notes.append(f"Over {sizes}.")
    for name, (collective, expected) in _cases(len(devices)).items():
        try:
            _check_collective(collective, mesh, expected)
            section.add(name, PASSED)
        except Exception as error:
            section.add(name, f"{FAILED} {first_line(error)}")
            section.problems.append(f"{name} over {sizes}: {first_line(error)}")
    if not section.problems:
        seconds = _time_all_reduce(mesh)
        # Bus bandwidth: each byte leaves a device twice (reduce-scatter, all-gather), except the device's own share.
        rate = 2 * (len(devices) - 1) / len(devices) * REDUCED_BYTES / seconds / 1e9
        section.notes.append(
            f"An all-reduce of {REDUCED_BYTES // 2**20} MiB per device takes {seconds * 1e3:.2f} ms: {rate:.1f} GB/s."
        )
    return section


def _inputs(num_devices: int) -> np.ndarray:
    """Return a row of small integers for each device, whose sums are exact in float32."""
    return np.arange(2 * num_devices**2, dtype=np.float32).reshape(num_devices, 2 * num_devices) % 251


def _cases(num_devices: int) -> dict[str, tuple[Callable[[jax.Array], jax.Array], np.ndarray]]:
    """Return each collective with its expected results, the rows of all devices concatenated."""
    rows = _inputs(num_devices)
    total = rows.sum(axis=0)
    ring = [(source, (source + 1) % num_devices) for source in range(num_devices)]
    return {
        "psum": (lambda x: lax.psum(x, "all"), np.tile(total, (num_devices, 1))),
        "all_gather": (lambda x: lax.all_gather(x, "all", tiled=True), np.tile(rows, (num_devices, 1))),
        "psum_scatter": (
            lambda x: lax.psum_scatter(x, "all", scatter_dimension=1, tiled=True),
            total.reshape(num_devices, 2),
        ),
        "ppermute": (lambda x: lax.ppermute(x, "all", ring), np.roll(rows, 1, axis=0)),
    }


def _on_all(function: Callable[[jax.Array], jax.Array], mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("all"), out_specs=P("all"), check_vma=False))


def _check_collective(collective: Callable[[jax.Array], jax.Array], mesh: Mesh, expected: np.ndarray) -> None:
    rows = _inputs(mesh.size)
    given = jax.make_array_from_callback(rows.shape, NamedSharding(mesh, P("all")), lambda index: rows[index])
    result = _on_all(collective, mesh)(given)
    for shard in result.addressable_shards:
        if not np.array_equal(shard.data, expected[shard.index]):
            raise ArithmeticError(f"the result on {shard.device} is wrong")


def _time_all_reduce(mesh: Mesh, num_rounds: int = 5) -> float:
    """Return the duration in seconds of the fastest of `num_rounds` all-reduces."""
    shape, sharding = (mesh.size, REDUCED_BYTES // 4), NamedSharding(mesh, P("all"))
    values = jax.jit(functools.partial(jnp.ones, shape), out_shardings=sharding)()
    all_reduce = _on_all(lambda x: lax.psum(x, "all"), mesh)
    seconds = []
    for _ in range(num_rounds + 1):  # the first one compiles
        start = time.perf_counter()
        all_reduce(values).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
