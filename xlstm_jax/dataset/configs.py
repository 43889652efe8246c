"""What data a run reads and how it is cut into batches."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from xlstm_jax.configs import ConfigError

T = TypeVar("T", bound="DataConfig")


@dataclasses.dataclass(kw_only=True, frozen=False)
class DataConfig:
    """What all kinds of data have in common."""

    shuffle_data: bool = False
    name: str | None = None
    """What this set is called where there are several."""
    data_config_type: str | None = None
    """Which kind of data this is, for those who choose the class by a name."""
    global_batch_size: int
    """The number of rows in a batch, over all devices of all processes."""
    max_target_length: int | None = None
    """The number of tokens in a row."""
    data_shuffle_seed: int = 42

    def __post_init__(self):
        _check_least(self, 1, "global_batch_size", "max_target_length")
        _check_least(self, 0, "data_shuffle_seed")

    @classmethod
    def create_train_eval_configs(
        cls: type[T],
        train_kwargs: dict[str, Any] | None = None,
        eval_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[T, T]:
        """Make a config for training and one for evaluation.

        Training shuffles, leaves out a last batch that is not full and reads the split `train`. Evaluation reads all of
        the split `validation` in order. Both hold only where the class has such a field.

        Args:
            train_kwargs: Fields of the config for training; they go before the values above.
            eval_kwargs: Fields of the config for evaluation.
            **kwargs: Fields of both; they go before all others.

        Returns:
            The config for training and that for evaluation.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        train = _present(fields, shuffle_data=True, drop_remainder=True, split="train")
        evaluation = _present(fields, shuffle_data=False, drop_remainder=False, split="validation")
        return (
            cls(**{**train, **(train_kwargs or {}), **kwargs}),
            cls(**{**evaluation, **(eval_kwargs or {}), **kwargs}),
        )


@dataclasses.dataclass(kw_only=True, frozen=False)
class TextDataConfig(DataConfig):
    """What data sets of documents have in common, from tokens to batches."""

    data_column: str = "text"
    max_steps_per_epoch: int | None = None
    """The number of batches after which an epoch ends, if the data does not end before."""
    tokenizer_path: str = "gpt2"
    hf_cache_dir: Path | str | None = None
    hf_access_token: str | None = dataclasses.field(default=None, repr=False)
    add_bos: bool = False
    add_eos: bool = False
    add_eod: bool = True
    """End each document that is shorter than a row with the token for the end of a document."""
    grain_packing: bool = False
    """Put several documents into a row, instead of padding each."""
    grain_packing_bin_count: int | None = None
    """How many rows are filled at a time; `None` for as many as a batch has."""
    worker_count: int = 1
    worker_buffer_size: int = 1
    """How many batches a worker prepares ahead."""
    drop_remainder: bool = False
    """Leave out the last rows, if they fill no batch."""
    batch_rampup_factors: dict[int, float] | None = None
    """From these steps on, batches have this many times `global_batch_size` rows."""

    def __post_init__(self):
        super().__post_init__()
        _check_least(self, 0, "worker_count")
        _check_least(self, 1, "worker_buffer_size", "grain_packing_bin_count", "max_steps_per_epoch")
        _check_rampup(self.global_batch_size, self.batch_rampup_factors)


@dataclasses.dataclass(kw_only=True, frozen=False)
class HFHubDataConfig(TextDataConfig):
    """A data set of the Hugging Face hub, or one on disk that `datasets` can read."""

    hf_path: Path | str
    hf_data_dir: Path | str | None = None
    hf_data_files: str | None = None
    split: str | None = "train"
    hf_num_data_processes: int | None = None
    """How many processes download and prepare the data."""

    def __post_init__(self):
        super().__post_init__()
        _check_least(self, 1, "hf_num_data_processes")


@dataclasses.dataclass(kw_only=True, frozen=False)
class SyntheticDataConfig(DataConfig):
    """Rows of zeros, to measure everything but the data."""

    num_batches: int = 100

    def __post_init__(self):
        super().__post_init__()
        _check_least(self, 1, "num_batches")


@dataclasses.dataclass(kw_only=True, frozen=False)
class GrainArrayRecordsDataConfig(TextDataConfig):
    """ArrayRecord files, `<data_path>/<split>/*.arecord`: each record is a text, or tokens of four bytes each."""

    data_path: Path
    split: str = "train"
    tokenize_data: bool = True
    """Whether records are texts; otherwise they are tokens."""


def _present(names: Collection[str], **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _check_rampup(batch_size: int, factors: dict[int, float] | None) -> None:
    for step, factor in (factors or {}).items():
        if int(step) < 0 or int(batch_size * factor) < 1:
            raise ConfigError(
                f"batch_rampup_factors gives {batch_size} * {factor} rows from step {step} on, but needs steps of at "
                "least 0 and factors that leave a row."
            )


def _check_least(config: DataConfig, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}, but must be at least {least}.")
