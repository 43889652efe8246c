"""The mesh: how many devices each kind of parallelism gets."""

import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.configs import ConfigError, check_numbers

LOGGER = logging.getLogger(__name__)

COLLECTIVE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(kw_only=True, frozen=False)
class ParallelConfig:
    """The mesh and the sharding of a model. At most one axis size may be -1: it takes all remaining devices."""

    data_axis_size: int = -1
    """Devices along the data axis, each with its own rows and all parameters; -1 for all remaining devices."""
    fsdp_axis_size: int = 1
    """Devices along the FSDP axis, each with its own rows and a shard of the parameters."""
    pipeline_axis_size: int = 1
    """Devices along the pipeline axis. The models have no pipeline stages: leave it at 1."""
    model_axis_size: int = 1
    """Devices along the tensor-parallel axis, over which each layer is sharded."""
    fsdp_axis_shrinks: bool = False
    """With fewer devices than `fsdp_axis_size`, shard over all of them instead of refusing to start."""
    data_axis_name: str = "dp"
    """Name of the data axis of the mesh."""
    fsdp_axis_name: str = "fsdp"
    """Name of the FSDP axis of the mesh."""
    pipeline_axis_name: str = "pp"
    """Name of the pipeline axis of the mesh."""
    model_axis_name: str = "tp"
    """Name of the tensor-parallel axis of the mesh."""
    remat: Sequence[str] = dataclasses.field(default_factory=list)
    """Names of the modules whose activations are recomputed in the backward pass."""
    fsdp_modules: Sequence[str] = dataclasses.field(default_factory=list)
    """Names of the modules whose parameters are sharded over the FSDP axis."""
    fsdp_min_weight_size: int = 2**18
    """Parameters with at most this many elements stay replicated."""
    fsdp_gather_dtype: str | None = None
    """Precision in which parameters are all-gathered; `None` is that of the parameters."""
    fsdp_grad_scatter_dtype: str | None = None
    """Precision of the reduce-scatter of gradients; `None` is that of the parameters."""
    tp_async_dense: bool = False
    """Overlap the communication of tensor-parallel layers with their matmuls, in a ring."""

    def __post_init__(self):
        check_numbers(self, ParallelConfig)
        for field in ("fsdp_gather_dtype", "fsdp_grad_scatter_dtype"):
            value = getattr(self, field)
            if value is not None and value not in COLLECTIVE_DTYPES:
                raise ConfigError(f"{field} is {value!r}, but must be None or one of {', '.join(COLLECTIVE_DTYPES)}.")
        for field in ("remat", "fsdp_modules"):
            if isinstance(getattr(self, field), str):
                raise ConfigError(f"{field} is {getattr(self, field)!r}, but must be a list of names.")

    def ignored_fields(self) -> dict[str, str]:
        """Return the fields that have no effect with the others, each with the reason."""
        reasons = {}
        if not self.fsdp_modules:
            of_fsdp = ("fsdp_min_weight_size", "fsdp_gather_dtype", "fsdp_grad_scatter_dtype")
            reasons |= dict.fromkeys(of_fsdp, "without fsdp_modules, whose parameters would be sharded")
        if self.fsdp_axis_size == 1:
            reasons["fsdp_axis_shrinks"] = "on an fsdp_axis_size of 1"
        return reasons

    @property
    def axis_sizes(self) -> dict[str, int]:
        """The requested size of each mesh axis, in mesh order."""
        return {
            self.data_axis_name: self.data_axis_size,
            self.fsdp_axis_name: self.fsdp_axis_size,
            self.pipeline_axis_name: self.pipeline_axis_size,
            self.model_axis_name: self.model_axis_size,
        }

    def fit(self, num_devices: int) -> dict[str, int]:
        """Return the size of each mesh axis on this many devices, in mesh order.

        Raises:
            ConfigError: The sizes do not match the number of devices; the message names the setting to change.
        """
        sizes = self.axis_sizes
        if len(sizes) < 4:
            raise ConfigError(f"The four mesh axes need four different names, not {', '.join(sizes)}.")
        fields = dict(zip(sizes, AXIS_SIZE_FIELDS, strict=True))
        requested = ", ".join(f"{name}={size}" for name, size in sizes.items())

        def impossible(reason: str) -> ConfigError:
            return ConfigError(f"Impossible mesh {requested} for {_count(num_devices)}: {reason}")

        if num_devices < 1:
            raise impossible("there is no device to use.")
        free = [name for name, size in sizes.items() if size == -1]
        wrong = [name for name, size in sizes.items() if size < 1 and size != -1]
        if wrong:
            raise impossible(f"{fields[wrong[0]]} must be at least 1, or -1 for the devices that are left.")
        if len(free) > 1:
            raise impossible(f"only one axis can take the devices that are left, not {' and '.join(free)}.")
        if self.fsdp_axis_shrinks and self.fsdp_axis_size > 0:
            others = math.prod(size for name, size in sizes.items() if name != self.fsdp_axis_name and size > 0)
            sizes[self.fsdp_axis_name] = min(self.fsdp_axis_size, max(1, num_devices // others))
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if (num_devices % fixed) if free else (num_devices != fixed):
            needed = f"{'a multiple of ' * bool(free)}{_count(fixed)}"
            raise impossible(f"the sizes need {needed}. {_smaller_axis(sizes, fields, num_devices)}")
        return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}


AXIS_SIZE_FIELDS = ("data_axis_size", "fsdp_axis_size", "pipeline_axis_size", "model_axis_size")
"""The fields of `ParallelConfig` with the sizes of the mesh axes, in mesh order."""


def _count(num_devices: int) -> str:
    return f"{num_devices} device{'s' * (num_devices != 1)}"


def _smaller_axis(sizes: Mapping[str, int], fields: Mapping[str, str], num_devices: int) -> str:
    """Return one setting with which the mesh matches the number of devices."""
    free = -1 in sizes.values()
    for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
        others = math.prod(size for other, size in sizes.items() if other != name and size > 0)
        if sizes[name] > 0 and num_devices % others == 0:
            left = num_devices // others
            return f"Set {fields[name]}={math.gcd(sizes[name], left) if free else left}."
    return "Set data_axis_size=-1 and all other sizes to 1."


def initialize_mesh(
    parallel_config: ParallelConfig,
    device_array: np.ndarray | None = None,
    init_distributed_on_slurm: bool = True,
) -> Mesh:
    """Arrange the devices in a mesh with the axes data, FSDP, pipeline, model.

    Distributed JAX is initialised first, but only in a SLURM step (unless `init_distributed_on_slurm` is False), or if
    the variable `JAX_COORDINATOR_ADDRESS` is set, with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`.

    Args:
        parallel_config: The sizes and names of the axes.
        device_array: The devices to use; all of them by default.
        init_distributed_on_slurm: Whether to initialise distributed JAX in a SLURM step.

    Returns:
        The mesh. The model axis is innermost: its devices are neighbours.
    """
    if device_array is None:
        _initialize_distributed(init_distributed_on_slurm)
        device_array = np.array(jax.devices())
    devices = np.asarray(device_array).reshape(-1)
    try:
        sizes = parallel_config.fit(devices.size)
    except ConfigError as error:
        shown = ", ".join(str(device) for device in devices[:8]) + (", ..." if devices.size > 8 else "")
        raise ConfigError(f"{error} The devices are {shown}.") from error
    shrunk = sizes[parallel_config.fsdp_axis_name]
    if 0 < shrunk < parallel_config.fsdp_axis_size:
        fewer = f"{_count(devices.size)} for fsdp_axis_size={parallel_config.fsdp_axis_size}"
        LOGGER.warning("%s: parameters are %s.", fewer, f"sharded over {shrunk}" if shrunk > 1 else "not sharded")
    return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))


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
