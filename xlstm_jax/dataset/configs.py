"""Configs of data: what is read, and how it is arranged in batches."""

import dataclasses
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeVar

from xlstm_jax.configs import ConfigError, check_least, check_numbers

T = TypeVar("T", bound="DataConfig")


class DefaultName(str):
    """A default that can be distinguished from the same text set by a user."""

    __slots__ = ()


@dataclasses.dataclass(kw_only=True, frozen=False)
class DataConfig:
    """The fields that all kinds of data share."""

    shuffle_data: bool = False
    """Whether documents are read in a random order, a new one in every epoch."""
    name: str | None = None
    """The name of this set in a mixture."""
    data_config_type: str | None = None
    """The kind of data, for recipes, which choose the class by this name."""
    global_batch_size: int
    """The number of rows in a batch, over all devices of all processes."""
    max_target_length: int | None = None
    """The number of tokens in a row."""
    data_shuffle_seed: int = 42
    """Seed of that order, and of all other random choices in the data."""

    def __post_init__(self):
        check_numbers(self)
        check_least(self, 1, "global_batch_size", "max_target_length")
        check_least(self, 0, "data_shuffle_seed")

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect given the other fields, by name, for `configs.describe_ignored`."""
        return {}

    @classmethod
    def create_train_eval_configs(
        cls: type[T],
        train_kwargs: dict[str, Any] | None = None,
        eval_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[T, T]:
        """Make a config for training and one for evaluation.

        Training shuffles, drops a last batch that is not full and reads the split `train`. Evaluation reads all of the
        split `validation` in order. Defaults apply only to fields that the class has.

        Args:
            train_kwargs: Fields of the config for training; they override the defaults above.
            eval_kwargs: Fields of the config for evaluation.
            **kwargs: Fields of both configs; they override all others.

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
    """The fields that data sets of documents share, from tokens to batches."""

    data_column: str = "text"
    """The column or JSON field that holds the text."""
    max_steps_per_epoch: int | None = None
    """The largest number of batches in an epoch."""
    tokenizer_path: str | None = DefaultName("gpt2")
    """The tokenizer, as for `load_tokenizer`. For tokens on disk that have a manifest, which names their tokenizer,
    it may be omitted or `None`; one that is set must be the same."""
    hf_cache_dir: Path | str | None = None
    """Where downloads from the Hugging Face hub are cached; `None` for the default of the library."""
    hf_access_token: str | None = dataclasses.field(default=None, repr=False)
    """Access token for the Hugging Face hub."""
    add_bos: bool = False
    """Begin each document with the beginning-of-sequence token."""
    add_eos: bool = False
    """End each document with the end-of-sequence token."""
    add_eod: bool = True
    """Append the token that ends a document, which the tokenizer calls the end of a sequence, to each document."""
    packing: Literal["stream", "first_fit", "none"] | None = None
    """How documents are arranged in rows. With `stream`, a row is endless: a document continues in the same row of the
    next batch. With `first_fit`, pieces of at most a row are packed together. With `none`, each piece is padded to a
    row. By default, `first_fit` if `grain_packing` is set, else `none`."""
    grain_packing: bool = False
    """Pack several documents into a row, instead of padding each."""
    grain_packing_bin_count: int | None = None
    """The number of rows that `first_fit` fills at a time; `None` for those of a batch."""
    worker_count: int = 1
    """The number of processes that read and tokenise texts; 0 for a thread. Tokens on disk need none."""
    worker_buffer_size: int = 1
    """The number of batches that are prepared ahead."""
    drop_remainder: bool = False
    """Repeat the data without a break, so that no row is padded; otherwise every epoch is one pass over all documents,
    whose last rows are padded."""
    on_bad_data: Literal["error", "skip"] = "error"
    """Whether documents that are empty, damaged or missing are an error, or are skipped and counted."""
    batch_rampup_factors: dict[int, float] | None = None
    """Factors of `global_batch_size`, by the step from which they apply."""

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 0, "worker_count")
        check_least(self, 1, "worker_buffer_size", "grain_packing_bin_count", "max_steps_per_epoch")
        _check_rampup(self.global_batch_size, self.batch_rampup_factors)
        _check_choice(self, "packing", "stream", "first_fit", "none", None)
        _check_choice(self, "on_bad_data", "error", "skip")
        if self.grain_packing and self.packing == "none":
            raise ConfigError('grain_packing is set and packing is "none": leave one of them out.')

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect given the other fields, by name."""
        reasons = super().ignored_fields()
        if not self.shuffle_data:
            reasons["data_shuffle_seed"] = "without shuffle_data"
        if self.packing_name != "first_fit":
            reasons["grain_packing_bin_count"] = f"on the packing {self.packing_name!r}, only on 'first_fit'"
        return reasons

    @property
    def packing_name(self) -> Literal["stream", "first_fit", "none"]:
        """The packing that results from `packing` and `grain_packing`."""
        return self.packing or ("first_fit" if self.grain_packing else "none")


@dataclasses.dataclass(kw_only=True, frozen=False)
class HFHubDataConfig(TextDataConfig):
    """A data set of the Hugging Face hub, or one on disk that `datasets` can read."""

    hf_path: Path | str
    """Name of the data set on the hub, or a folder on disk."""
    hf_data_dir: Path | str | None = None
    """The folder of the data set to read; `None` for all of it."""
    hf_data_files: str | None = None
    """Pattern for the files of the data set to read; `None` for all."""
    split: str | None = "train"
    """The split to read."""
    hf_num_data_processes: int | None = None
    """The number of processes that download and prepare the data."""

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 1, "hf_num_data_processes")


@dataclasses.dataclass(kw_only=True, frozen=False)
class SyntheticDataConfig(DataConfig):
    """Synthetic batches: rows of zeros or, with a `vocab_size`, random tokens packed into documents."""

    num_batches: int = 100
    """The number of batches in an epoch; all epochs have the same batches."""
    vocab_size: int | None = None
    """The number of different tokens, of which the first are the most frequent; `None` for zeros alone."""
    mean_document_length: int | None = None
    """The mean length of random documents before the last one of a row is truncated; `None` for one document per
    row."""

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 1, "num_batches", "vocab_size", "mean_document_length")
        if self.mean_document_length is not None and self.vocab_size is None:
            raise ConfigError(
                f"mean_document_length is {self.mean_document_length}, but rows of zeros are one document each: set "
                "vocab_size too, or mean_document_length to null."
            )

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect given the other fields, by name."""
        reasons = super().ignored_fields() | {"shuffle_data": "on synthetic batches, which are the same in all epochs"}
        return reasons | ({"data_shuffle_seed": "on rows of zeros"} if self.vocab_size is None else {})


@dataclasses.dataclass(kw_only=True, frozen=False)
class FormalTaskDataConfig(DataConfig):
    """Examples of a formal language or of associative recall, drawn from `data_shuffle_seed`, each a row."""

    task: str
    """A name in `tasks.formal_languages.TASKS`."""
    min_length: int
    """The length of the shortest strings, without question and answer."""
    max_length: int
    """The length of the longest strings; all lengths in the range are equally likely."""
    num_batches: int = 100
    """The number of batches in an epoch; each epoch has its own examples only if `shuffle_data` is set."""

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 1, "num_batches", "min_length")
        check_least(self, self.min_length, "max_length")


@dataclasses.dataclass(kw_only=True, frozen=False)
class GrainArrayRecordsDataConfig(TextDataConfig):
    """ArrayRecord files, `<data_path>/<split>/*.arecord`: each record is a text, or tokens of four bytes each."""

    data_path: Path | str
    """Folder with a subfolder for each split."""
    split: str = "train"
    """The split to read."""
    tokenize_data: bool = True
    """Whether records are texts, not tokens."""

    def __post_init__(self):
        super().__post_init__()
        self.data_path = Path(self.data_path)

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect given the other fields, by name."""
        reasons = super().ignored_fields() | {"data_column": "on ArrayRecord files, whose records are texts or tokens"}
        if not self.tokenize_data:
            reasons |= dict.fromkeys(("add_bos", "add_eos", "worker_count"), "on tokens: `prepare` has decided on it")
        return reasons


@dataclasses.dataclass(kw_only=True, frozen=False)
class TextFilesDataConfig(TextDataConfig):
    """Plain text, JSON lines or Parquet, compressed or not: a file, a folder or a pattern such as `data/*.jsonl.gz`."""

    data_path: Path | str
    """A file, a folder or a pattern."""
    max_document_bytes: int | None = 65536
    """Longer plain text files are cut at line ends into several documents, as they would fill many rows."""

    def __post_init__(self):
        super().__post_init__()
        check_least(self, 4, "max_document_bytes")  # the bytes of the longest character


@dataclasses.dataclass(kw_only=True, frozen=False)
class StandardLibraryDataConfig(TextDataConfig):
    """The source code of the standard library of the running Python: real text without a download."""

    split: Literal["train", "validation"] = "train"
    """The split to read."""
    tokenizer_path: str | None = "byte"

    def __post_init__(self):
        super().__post_init__()
        _check_choice(self, "split", "train", "validation")

    def ignored_fields(self) -> dict[str, str]:
        """Return why fields have no effect given the other fields, by name."""
        return super().ignored_fields() | {"data_column": "on the standard library, which has no columns"}


def _present(names: Collection[str], **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _check_rampup(batch_size: int, factors: dict[int, float] | None) -> None:
    for step, factor in (factors or {}).items():
        if int(step) < 0 or not math.isfinite(factor) or int(batch_size * factor) < 1:
            raise ConfigError(
                f"batch_rampup_factors gives {batch_size} * {factor} rows from step {step} on, but needs steps of at "
                "least 0 and factors that leave a row."
            )


def _check_choice(config: DataConfig, name: str, *choices: str | None) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}.")
