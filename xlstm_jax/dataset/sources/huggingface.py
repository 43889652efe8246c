"""Data sets that the library `datasets` reads, from the Hugging Face hub or from disk."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import HFHubDataConfig
from xlstm_jax.dataset.shards.records import spread_numbers
from xlstm_jax.dataset.sources.numbered_texts import NumberedTexts
from xlstm_jax.dataset.sources.source import PathOptions

if TYPE_CHECKING:
    import datasets

HUB_PREFIX = "hf:"
"""The prefix of the name of a data set on the hub."""
_SAMPLE = 256
"""The number of rows that the digest of a data set covers."""


class ColumnTexts:
    """A column of a Hugging Face data set.

    Args:
        dataset: The data set.
        column: The name of the column.
    """

    def __init__(self, dataset: Any, column: str):
        if column not in dataset.column_names:
            raise ValueError(f"There is no column {column!r}, only {', '.join(dataset.column_names)}: set data_column.")
        self._dataset = dataset.select_columns([column])
        self._column = column
        # Reading all rows may take too long; a sample distinguishes most data sets, wherever they are stored.
        rows = np.linspace(0, len(dataset) - 1, num=_SAMPLE, dtype=int).tolist() if len(dataset) else []
        self.digest = hashlib.sha256(repr([len(dataset), self._dataset[rows][column]]).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, indices: Sequence[int]) -> list[str]:
        """Return some texts."""
        texts = self._dataset[list(indices)][self._column]
        for index, text in zip(indices, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(
                    f"Row {index} of the column {self._column!r} holds a {type(text).__name__}, not a text: set "
                    'data_column, or on_bad_data="skip" to skip such rows.'
                )
        return texts

    def scan(self, start: int, stop: int) -> Sequence[object]:
        """Return the values from one row up to another."""
        return self._dataset[start:stop][self._column]

    def describe(self) -> Mapping[str, Any]:
        """Return, for JSON, what identifies the texts."""
        samples = self._dataset[spread_numbers(len(self))][self._column]
        return {
            "column": self._column,
            "num_texts": len(self),
            "digest": self.digest,
            "sha256_of_samples": hashlib.sha256(json.dumps(list(samples), default=repr).encode()).hexdigest(),
        }

    @property
    def num_bytes(self) -> int:
        """The size of the column in memory."""
        return self._dataset.data.nbytes


def open_config(config: HFHubDataConfig) -> NumberedTexts:
    """Open the texts of a split."""
    path = str(config.hf_path)
    texts = ColumnTexts(load_huggingface_dataset(config), config.data_column)
    return NumberedTexts(
        path,
        texts,
        num_bytes=texts.num_bytes,
        describe=lambda: {"paths": [path], **texts.describe()},
        on_bad_data=config.on_bad_data,
        locations=[Path(path)],
    )


def open_paths(paths: Sequence[str], options: PathOptions) -> NumberedTexts | None:
    """Open `hf:` and the name of a data set on the hub, or a folder written by `save_to_disk`."""
    if len(paths) != 1:
        return None
    (path,) = paths
    if path == HUB_PREFIX:
        raise ConfigError(f"{path!r} names no data set: write {HUB_PREFIX}OWNER/NAME.")
    if not path.startswith(HUB_PREFIX) and not is_saved_dataset(path):
        return None
    config = HFHubDataConfig(
        hf_path=path.removeprefix(HUB_PREFIX),
        split=options.split,
        data_column=options.column,
        on_bad_data=options.on_bad_data,
        global_batch_size=1,  # of no interest here
    )
    return open_config(config)


def load_huggingface_dataset(config: HFHubDataConfig) -> "datasets.Dataset":
    """Load a data set from the hub or from a folder, including folders written by `save_to_disk`."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(f'The data set {config.hf_path} needs datasets: pip install "xlstm_jax[hf]".') from error
    path = str(config.hf_path)
    if is_saved_dataset(path):
        loaded = datasets.load_from_disk(path)
        if isinstance(loaded, datasets.DatasetDict):
            loaded = loaded if config.split is None else loaded.get(config.split, loaded)
        elif config.split not in (None, "train", loaded.split):
            raise ConfigError(
                f"split is {config.split!r}, but {path} holds one data set without splits, so training and validation "
                "would read the same: save a DatasetDict, or give the path of another data set with split='train'."
            )
    else:
        loaded = datasets.load_dataset(
            path,
            data_dir=None if config.hf_data_dir is None else str(config.hf_data_dir),
            data_files=config.hf_data_files,
            split=config.split,
            num_proc=config.hf_num_data_processes,
            token=config.hf_access_token,
            cache_dir=None if config.hf_cache_dir is None else str(config.hf_cache_dir),
        )
    if isinstance(loaded, datasets.DatasetDict):
        raise ValueError(
            f"split is {config.split!r}, but must be one of those of {path}: {', '.join(map(str, loaded))}."
        )
    return loaded


def is_saved_dataset(path: str) -> bool:
    """Return whether a path is a folder written by `save_to_disk` of a data set."""
    return any(Path(path, file).is_file() for file in ("dataset_dict.json", "state.json"))
