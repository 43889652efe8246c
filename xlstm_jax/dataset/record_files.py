"""Data sets that others have written: ArrayRecord files, and what the library `datasets` reads."""

from pathlib import Path
from typing import TYPE_CHECKING

import grain

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import HFHubDataConfig
from xlstm_jax.dataset.shards.records import find_shards, shard_number
from xlstm_jax.dataset.text_documents import is_saved_dataset

if TYPE_CHECKING:
    import datasets


def load_array_record_dataset(
    dataset_path: Path | str, file_extension: str = ".arecord"
) -> grain.sources.ArrayRecordDataSource:
    """Open the ArrayRecord files of a folder, in the order of the numbers that their names end with.

    Args:
        dataset_path: The folder, with files such as `train_000000.arecord`.
        file_extension: How the names of the files end.

    Returns:
        The records of all files.
    """
    folder = Path(dataset_path)
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}, to read files *_NNNNNN{file_extension} from.")
    files = find_shards(folder, file_extension)
    if not files:
        raise ValueError(f"The folder {folder} has no files *_NNNNNN{file_extension}.")
    if shard_number(files[0], file_extension) is None:
        raise ValueError(f"The name of {files[0]} must end with the number of its shard, *_NNNNNN{file_extension}.")
    return grain.sources.ArrayRecordDataSource([str(file) for file in files])


def load_huggingface_dataset(config: HFHubDataConfig) -> "datasets.Dataset":
    """Load a data set from the hub, or from a folder; also from one that `save_to_disk` has written."""
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
