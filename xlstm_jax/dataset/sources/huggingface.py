"""Data sets that the library `datasets` reads, from the Hugging Face hub or from disk."""

from typing import TYPE_CHECKING

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import HFHubDataConfig
from xlstm_jax.dataset.sources.texts import is_saved_dataset

if TYPE_CHECKING:
    import datasets


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
