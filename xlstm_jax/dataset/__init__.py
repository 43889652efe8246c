"""From files to batches; each name is imported when it is first used, so that batches cost no data libraries."""

from typing import TYPE_CHECKING

from xlstm_jax.import_utils import lazy_exports

if TYPE_CHECKING:
    from xlstm_jax.dataset.batch import Batch, LLMBatch, LLMIndexedBatch
    from xlstm_jax.dataset.configs import (
        DataConfig,
        FormalTaskDataConfig,
        GrainArrayRecordsDataConfig,
        HFHubDataConfig,
        StandardLibraryDataConfig,
        SyntheticDataConfig,
        TextDataConfig,
        TextFilesDataConfig,
    )
    from xlstm_jax.dataset.input_pipeline_interface import (
        DataIterator,
        create_data_iterator,
        create_mixed_data_iterator,
    )
    from xlstm_jax.dataset.tokenizers.loading import load_tokenizer

__all__ = [
    "Batch",
    "DataConfig",
    "DataIterator",
    "FormalTaskDataConfig",
    "GrainArrayRecordsDataConfig",
    "HFHubDataConfig",
    "LLMBatch",
    "LLMIndexedBatch",
    "StandardLibraryDataConfig",
    "SyntheticDataConfig",
    "TextDataConfig",
    "TextFilesDataConfig",
    "create_data_iterator",
    "create_mixed_data_iterator",
    "load_tokenizer",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Batch": "batch",
        "DataConfig": "configs",
        "DataIterator": "input_pipeline_interface",
        "FormalTaskDataConfig": "configs",
        "GrainArrayRecordsDataConfig": "configs",
        "HFHubDataConfig": "configs",
        "LLMBatch": "batch",
        "LLMIndexedBatch": "batch",
        "StandardLibraryDataConfig": "configs",
        "SyntheticDataConfig": "configs",
        "TextDataConfig": "configs",
        "TextFilesDataConfig": "configs",
        "create_data_iterator": "input_pipeline_interface",
        "create_mixed_data_iterator": "input_pipeline_interface",
        "load_tokenizer": "tokenizers.loading",
    },
)
