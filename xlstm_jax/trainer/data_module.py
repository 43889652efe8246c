"""The data of a training run."""

import dataclasses
from collections.abc import Iterator
from typing import Any

DataIterator = Iterator | Any
"""Yields batches, epoch after epoch; where it has `get_state` and `set_state`, a run resumes at the next batch."""


@dataclasses.dataclass
class DataloaderModule:
    """What a run trains, validates and tests on; several sets to validate or test on have names."""

    train_dataloader: DataIterator | None = None
    val_dataloader: DataIterator | dict[str, DataIterator] | None = None
    test_dataloader: DataIterator | dict[str, DataIterator] | None = None
