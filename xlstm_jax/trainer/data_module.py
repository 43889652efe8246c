"""The data of a training run."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

DataIterator = Iterator | Any
"""Yields batches, epoch after epoch; where it has `get_state` and `set_state`, a run resumes at the next batch."""


@dataclasses.dataclass
class DataloaderModule:
    """What a run trains, validates and tests on; several sets to validate or test on have names."""

    train_dataloader: DataIterator | None = None
    val_dataloader: DataIterator | dict[str, DataIterator] | None = None
    test_dataloader: DataIterator | dict[str, DataIterator] | None = None


@contextlib.contextmanager
def kept_in_place(loaders: Any) -> Iterator[None]:
    """Set loaders back to where they are now at the end of a block: what comes next sees what it would have seen."""
    parts = loaders.values() if isinstance(loaders, Mapping) else [loaders]
    resumable = [part for part in parts if is_resumable(part)]
    positions = [loader.get_state() for loader in resumable]
    try:
        yield
    finally:
        for loader, position in zip(resumable, positions, strict=True):
            loader.set_state(position)


def is_resumable(loader: Any) -> bool:
    """Tell whether a loader can say where it is, and go back there."""
    return hasattr(loader, "get_state") and hasattr(loader, "set_state")
