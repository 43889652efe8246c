"""From files to batches; each name is imported when it is first used, so that batches cost no data libraries."""

import importlib
from typing import TYPE_CHECKING, Any

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

_MODULES = {
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
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
