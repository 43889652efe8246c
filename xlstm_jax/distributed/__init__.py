"""Distribution over devices: meshes, sharded parameters and gradients, and gradient accumulation."""

from xlstm_jax.distributed.array_utils import fold_rng_over_axis, split_array_over_mesh
from xlstm_jax.distributed.data_parallel import shard_module_params, sync_gradients
from xlstm_jax.distributed.pipeline_parallel import PipelineModule, execute_pipeline
from xlstm_jax.distributed.single_gpu import accumulate_gradients
from xlstm_jax.distributed.tensor_parallel import (
    ModelParallelismWrapper,
    TPAsyncDense,
    TPDense,
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)
from xlstm_jax.distributed.xla_utils import set_XLA_flags, simulate_CPU_devices

__all__ = [
    "ModelParallelismWrapper",
    "PipelineModule",
    "TPAsyncDense",
    "TPDense",
    "accumulate_gradients",
    "async_gather",
    "async_gather_bidirectional",
    "async_gather_split",
    "async_scatter",
    "async_scatter_split",
    "execute_pipeline",
    "fold_rng_over_axis",
    "set_XLA_flags",
    "shard_module_params",
    "simulate_CPU_devices",
    "split_array_over_mesh",
    "sync_gradients",
]
