"""Launch of kernels for Hopper GPUs: named references, and warpgroup specialisation."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.pallas import Index, Interpret, pl, plgpu

Refs = TypeVar("Refs")

COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24
"""Registers per thread of a compute warpgroup, and of the load warpgroup."""


def launch(
    kernel: Callable[[Refs], None],
    refs_type: Callable[..., Refs],
    *,
    name: str,
    inputs: Mapping[str, jax.Array | None],
    outputs: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch: Mapping[str, Any],
    grid: Mapping[str, int],
    num_warpgroups: int,
    cluster: Mapping[str, int] | None = None,
    interpret: Interpret = None,
) -> dict[str, jax.Array]:
    """Run a kernel whose references are the fields of a dataclass; unused fields are `None`.

    Args:
        kernel: The kernel; the axis over its warpgroups is `warpgroup`.
        refs_type: The dataclass, with a field for each input, output and scratch buffer.
        name: The name of the kernel in profiles.
        inputs: Its input arrays.
        outputs: The shapes of its results.
        scratch: Shared memory and barriers of a thread block.
        grid: The axes over thread blocks, the fastest last.
        num_warpgroups: Warpgroups of a thread block.
        cluster: The axes over the thread blocks of a cluster.
        interpret: How to simulate a GPU on a CPU.
    """
    absent = dict.fromkeys(name for name, x in (*inputs.items(), *outputs.items()) if x is None)
    inputs = {name: x for name, x in inputs.items() if x is not None}
    outputs = {name: x for name, x in outputs.items() if x is not None}
    names = [*inputs, *outputs, *scratch]

    def body(*refs: Any) -> None:
        kernel(refs_type(**absent, **dict(zip(names, refs, strict=True))))

    body.__name__ = name
    results = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        scratch_types=list(scratch.values()),
        # No region of shared memory is both read and written by plain loads and stores of one warpgroup. Sums over rows
        # are within the threads of the row, so they need no scratch memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
        **({"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)} if cluster else {}),
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def run_once(results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the results of a kernel behind a barrier.

    In a scan that stacks results, XLA would otherwise run the kernel twice: for the stack, and for other uses.
    """
    return dict(zip(results, lax.optimization_barrier(list(results.values())), strict=True))


def specialize_warpgroups(num_warpgroups: int, *, compute: Callable[[Index], None], load: Callable[[], None]) -> None:
    """Specialise warpgroups: the last one loads tiles, all others compute and get most of the registers."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)

    @pl.when(warpgroup == num_warpgroups)
    def _() -> None:
        plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        load()
