"""From files to batches; each name is imported when it is first used, so that batches cost no data libraries."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xlstm_jax.dataset.batch import Batch, LLMBatch, LLMIndexedBatch
    from xlstm_jax.dataset.configs import (
        DataConfig,
        GrainArrayRecordsDataConfig,
        HFHubDataConfig,
        SyntheticDataConfig,
        TextDataConfig,
    )

__all__ = [
    "Batch",
    "DataConfig",
    "GrainArrayRecordsDataConfig",
    "HFHubDataConfig",
    "LLMBatch",
    "LLMIndexedBatch",
    "SyntheticDataConfig",
    "TextDataConfig",
]

_MODULES = {
    "Batch": "batch",
    "DataConfig": "configs",
    "GrainArrayRecordsDataConfig": "configs",
    "HFHubDataConfig": "configs",
    "LLMBatch": "batch",
    "LLMIndexedBatch": "batch",
    "SyntheticDataConfig": "configs",
    "TextDataConfig": "configs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
