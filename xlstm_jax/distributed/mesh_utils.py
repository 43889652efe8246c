"""The mesh: how many devices each kind of parallelism gets."""

import dataclasses
import logging
import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.configs import ConfigError

LOGGER = logging.getLogger(__name__)

COLLECTIVE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(kw_only=True, frozen=False)
class ParallelConfig:
    """How a model is spread over devices. At most one axis size may be -1: it takes the devices that are left."""

    data_axis_size: int = -1
    fsdp_axis_size: int = 1
    pipeline_axis_size: int = 1
    model_axis_size: int = 1
    data_axis_name: str = "dp"
    fsdp_axis_name: str = "fsdp"
    pipeline_axis_name: str = "pp"
    model_axis_name: str = "tp"
    remat: Sequence[str] = dataclasses.field(default_factory=list)
    """Names of the modules whose activations are computed again in the backward pass."""
    fsdp_modules: Sequence[str] = dataclasses.field(default_factory=list)
    """Names of the modules whose parameters are split over the FSDP axis."""
    fsdp_min_weight_size: int = 2**18
    """Parameters with at most this many elements stay replicated."""
    fsdp_gather_dtype: str | None = None
    """Precision in which parameters are gathered; `None` is that of the parameters."""
    fsdp_grad_scatter_dtype: str | None = None
    """Precision in which gradients are summed and scattered; `None` is that of the parameters."""
    tp_async_dense: bool = False
    """Hide the communication of tensor-parallel layers behind their matrix products, with rings."""

    def __post_init__(self):
        for field in ("fsdp_gather_dtype", "fsdp_grad_scatter_dtype"):
            value = getattr(self, field)
            if value is not None and value not in COLLECTIVE_DTYPES:
                raise ConfigError(f"{field} is {value!r}, but must be None or one of {', '.join(COLLECTIVE_DTYPES)}.")
        for field in ("remat", "fsdp_modules"):
            if isinstance(getattr(self, field), str):
                raise ConfigError(f"{field} is {getattr(self, field)!r}, but must be a list of names.")

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The size asked for of each mesh axis, in mesh order."""
        return {
            self.data_axis_name: self.data_axis_size,
            self.fsdp_axis_name: self.fsdp_axis_size,
            self.pipeline_axis_name: self.pipeline_axis_size,
            self.model_axis_name: self.model_axis_size,
        }


def initialize_mesh(
    parallel_config: ParallelConfig,
    device_array: np.ndarray | None = None,
    init_distributed_on_slurm: bool = True,
) -> Mesh:
    """Arrange the devices in a mesh with the axes data, FSDP, pipeline, model.

    Processes find each other first: in a SLURM step (unless `init_distributed_on_slurm` is False), and where the
    variable `JAX_COORDINATOR_ADDRESS` is set, with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Nowhere else.

    Args:
        parallel_config: The sizes and names of the axes.
        device_array: The devices to use; all of them by default.
        init_distributed_on_slurm: Whether to start distributed JAX in a SLURM step.

    Returns:
        The mesh. The model axis is innermost: its devices are neighbours.
    """
    if device_array is None:
        _initialize_distributed(init_distributed_on_slurm)
        device_array = np.array(jax.devices())
    devices = np.asarray(device_array).reshape(-1)
    sizes = parallel_config.axis_sizes
    if len(sizes) < 4:
        raise ConfigError(f"The four mesh axes need four different names, not {', '.join(sizes)}.")
    return Mesh(devices.reshape(_fit_sizes(sizes, devices)), tuple(sizes))


def _fit_sizes(sizes: dict[str, int], devices: np.ndarray) -> tuple[int, ...]:
    """Replace a -1 by the number of devices left, or say why the mesh is impossible."""

    def impossible(reason: str) -> ConfigError:
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
        shown = ", ".join(str(device) for device in devices[:8]) + (", ..." if devices.size > 8 else "")
        return ConfigError(f"Impossible mesh {asked} for {devices.size} devices ({shown}): {reason}")

    free = [name for name, size in sizes.items() if size == -1]
    wrong = [name for name, size in sizes.items() if size < 1 and size != -1]
    if wrong:
        raise impossible(f"the size of {wrong[0]} must be at least 1, or -1 for the devices that are left.")
    if len(free) > 1:
        raise impossible(f"only one axis can take the devices that are left, not {' and '.join(free)}.")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and devices.size % fixed:
        raise impossible(f"the other axes need a multiple of {fixed} devices.")
    if not free and devices.size != fixed:
        raise impossible(f"the sizes need {fixed} devices; set one of them to -1, or pass the devices to use.")
    return tuple(devices.size // fixed if size == -1 else size for size in sizes.values())


def _initialize_distributed(on_slurm: bool) -> None:
    if jax.distributed.is_initialized():
        return
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        values = {name: os.environ.get(name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
        missing = [name for name, value in values.items() if value is None]
        if missing and "SLURM_STEP_NODELIST" not in os.environ:
            raise ValueError(
                f"JAX_COORDINATOR_ADDRESS is set, but not {' and '.join(missing)}: set all three, or none."
            )
        num_processes, process_id = (None if value is None else int(value) for value in values.values())
        jax.distributed.initialize(num_processes=num_processes, process_id=process_id)
    elif on_slurm and "SLURM_STEP_NODELIST" in os.environ:
        jax.distributed.initialize()
    else:
        return
    LOGGER.info("Process %d of %d is connected.", jax.process_index(), jax.process_count())
