"""xLSTM language models in JAX: train, evaluate and sample. Names are imported on first use."""

from typing import TYPE_CHECKING

from xlstm_jax.import_utils import lazy_exports
from xlstm_jax.version import __version__

if TYPE_CHECKING:
    from xlstm_jax.dataset import LLMBatch, create_data_iterator
    from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
    from xlstm_jax.models.configs import ModelConfig
    from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
    from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
    from xlstm_jax.trainer.llm.trainer import LLMTrainer, LLMTrainerConfig
    from xlstm_jax.trainer.optimizer import OptimizerConfig, SchedulerConfig

__all__ = [
    "XLSTM",
    "LLMBatch",
    "LLMTrainer",
    "LLMTrainerConfig",
    "LlamaConfig",
    "LlamaTransformer",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "XLSTMConfig",
    "__version__",
    "create_data_iterator",
    "initialize_mesh",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "LLMBatch": "dataset",
        "LLMTrainer": "trainer.llm.trainer",
        "LLMTrainerConfig": "trainer.llm.trainer",
        "LlamaConfig": "models.llama",
        "LlamaTransformer": "models.llama",
        "ModelConfig": "models.configs",
        "OptimizerConfig": "trainer.optimizer",
        "ParallelConfig": "distributed.mesh_utils",
        "SchedulerConfig": "trainer.optimizer",
        "XLSTM": "models.xlstm",
        "XLSTMConfig": "models.xlstm",
        "create_data_iterator": "dataset",
        "initialize_mesh": "distributed.mesh_utils",
    },
)
