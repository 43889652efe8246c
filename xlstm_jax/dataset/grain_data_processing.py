"""Per-host toolbox on grain: rows of tokens from the documents of a host.

Only `make_grain_iterator` has the order of `xlstm_jax.dataset.order`, which does not depend on the number of hosts.

No token is lost: a document that is longer than a row is cut into pieces, each a row or a segment of its own. The first
input of a document is the token that ends documents; the first input of a later piece is the token before it.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import grain
from jax.sharding import Mesh

from xlstm_jax.dataset.configs import TextDataConfig
from xlstm_jax.dataset.grain_iterator import local_batch_size, pack_documents, read_documents
from xlstm_jax.dataset.grain_transforms import (
    TOKEN_KEYS,
    AddEODToken,
    HFNormalizeFeatures,
    HFTokenize,
    InferSegmentations,
    PadToMaxLength,
    ParseArrayRecords,
    ParseTokenizedArrayRecords,
    ShiftData,
)
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator
from xlstm_jax.dataset.order.pipeline import make_ordered_iterator
from xlstm_jax.dataset.shards.records import find_shards, shard_number
from xlstm_jax.dataset.sources.huggingface import load_huggingface_dataset as load_huggingface_dataset
from xlstm_jax.dataset.tokenizers.loading import load_tokenizer


def make_grain_iterator(
    configs: TextDataConfig | Sequence[TextDataConfig],
    global_mesh: Mesh,
    process_indices: Sequence[int],
    dataset_weights: Sequence[float | int] | None = None,
    weights_at_steps: Mapping[int, Sequence[float | int]] | None = None,
) -> MultiHostDataLoadIterator:
    """Make global batches of one data set or a mixture, in an order that does not depend on the number of hosts.

    Args:
        configs: The data set or sets.
        global_mesh: The mesh; the rows of a batch are sharded over all of its devices.
        process_indices: The processes that load data: all that have devices in the mesh.
        dataset_weights: The share of tokens of each data set, in any unit; equal shares by default.
        weights_at_steps: Other weights, by the step from which they apply.

    Returns:
        The iterator of `make_ordered_iterator`.
    """
    owners = {device.process_index for device in global_mesh.devices.flat}
    if set(process_indices) != owners:
        raise ValueError(
            f"process_indices are {list(process_indices)}, but all processes with devices in the mesh have to load "
            f"data: {sorted(owners)}."
        )
    datasets = [configs] if isinstance(configs, TextDataConfig) else configs
    return make_ordered_iterator(datasets, global_mesh, dataset_weights, weights_at_steps)


def preprocess_dataset(
    dataloading_host_index: int,
    dataloading_host_count: int,
    dataset: Any,
    data_column_name: str,
    tokenize: bool,
    global_batch_size: int,
    max_target_length: int,
    shuffle: bool,
    data_shuffle_seed: int,
    tokenizer_path: str | Path | None = None,
    hf_access_token: str | None = None,
    add_bos: bool = True,
    add_eos: bool = True,
    add_eod: bool = True,
    grain_packing: bool = False,
    grain_packing_bin_count: int | None = None,
    shift: bool = True,
    drop_remainder: bool = True,
    num_epochs: int | None = None,
    tokenizer_cache_dir: str | Path | None = None,
    max_steps_per_epoch: int | None = None,
    eod_token_id: int | None = None,
) -> tuple[grain.IterDataset, grain.sources.RandomAccessDataSource]:
    """Make rows of tokens from the documents that a host reads.

    Args:
        dataloading_host_index: The index of this host.
        dataloading_host_count: The number of hosts that read the documents.
        dataset: The documents of all hosts, with a length and indexing. Each is bytes, as in ArrayRecord files, or a
            dictionary of columns. An empty document gets no special tokens, as it has nothing to predict.
        data_column_name: The column of the documents.
        tokenize: Whether documents are texts, not tokens.
        global_batch_size: The number of rows in a batch of all hosts.
        max_target_length: The number of tokens in a row.
        shuffle: Shuffle the documents, differently in each epoch, and packed rows.
        data_shuffle_seed: The seed of the order, together with the index of the host.
        tokenizer_path: The tokenizer, as for `load_tokenizer`.
        hf_access_token: As for `load_tokenizer`.
        add_bos: As for `load_tokenizer`.
        add_eos: As for `load_tokenizer`.
        add_eod: End each document with `eod_token_id`.
        grain_packing: Put several documents into a row; otherwise each document, or piece of one, is padded to a row.
        grain_packing_bin_count: The number of rows filled at a time; by default, those of this host in a batch.
        shift: Make each input the token before its target; otherwise they are the same.
        drop_remainder: If False, and without packing, empty documents pad the data to whole batches.
        num_epochs: The number of passes over the documents; `None` for endless, which several hosts that pack need, as
            their numbers of rows differ.
        tokenizer_cache_dir: As for `load_tokenizer`.
        max_steps_per_epoch: The largest number of batches in an epoch. The next epoch continues with the documents that
            follow.
        eod_token_id: The token that ends a document; by default, the tokenizer's end of a sequence. Without packing,
            each further one within a document starts a new segment.

    Returns:
        Rows with the arrays of an `LLMBatch`, and the documents of all hosts in an epoch. The number of documents is
        the length that `make_grain_multihost_iterator` takes: an epoch has as many rows as documents, although cut
        documents make more rows, and packed documents fewer.
    """
    if tokenizer_path is None and (tokenize or eod_token_id is None):
        raise ValueError("tokenizer_path is None: texts need a tokenizer, and so do tokens without an eod_token_id.")
    create_tokenizer = functools.partial(
        load_tokenizer, str(tokenizer_path), add_bos, add_eos, hf_access_token, cache_dir=tokenizer_cache_dir
    )
    if eod_token_id is None:
        eod_token_id = create_tokenizer().eos_token_id
    if eod_token_id is None:
        raise ValueError(
            f"The tokenizer {str(tokenizer_path)!r} has no token for the end of a sequence: set eod_token_id."
        )

    if tokenize:
        to_tokens = HFTokenize(create_tokenizer, data_column_name, add_eod=add_eod, eod_token_id=eod_token_id)
    else:
        to_tokens = AddEODToken(eod_token_id, add_eod)
    source = dataset if drop_remainder or grain_packing else pad_dataset(dataset, global_batch_size, data_column_name)
    documents = read_documents(
        source,
        dataloading_host_index=dataloading_host_index,
        dataloading_host_count=dataloading_host_count,
        shuffle=shuffle,
        data_shuffle_seed=data_shuffle_seed,
        num_epochs=num_epochs,
        operations=[
            *_parse_records(dataset, data_column_name, tokenize),
            _UnlessEmpty(to_tokens.map, data_column_name),
            HFNormalizeFeatures(data_column_name),
            *([ShiftData(shift_target=False, eod_token_id=eod_token_id, axis=0)] if shift else []),
        ],
    )
    # Without packing, an empty document is a row, so that hosts have at least as many rows as documents.
    pieces = documents.apply(_Cut(max_target_length, keep_empty=not grain_packing))
    if grain_packing:
        rows = pack_documents(
            pieces,
            max_target_length,
            num_bins=grain_packing_bin_count or local_batch_size(global_batch_size, dataloading_host_count),
            shuffle=shuffle,
            seed=data_shuffle_seed + dataloading_host_index,
        )
    else:
        rows = pieces.map(PadToMaxLength(max_target_length))
        rows = rows.map(InferSegmentations(eod_token_id)) if shift else rows
    if max_steps_per_epoch is not None:
        source = PaddedDataset(source, min(len(source), max_steps_per_epoch * global_batch_size), data_column_name)
    return rows, source


def load_array_record_dataset(
    dataset_path: Path | str, file_extension: str = ".arecord"
) -> grain.sources.ArrayRecordDataSource:
    """Open the ArrayRecord files of a folder, in the order of the numbers at the ends of their names.

    Args:
        dataset_path: The folder, with files such as `train_000000.arecord`.
        file_extension: The suffix of the files.

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


class PaddedDataset(grain.sources.RandomAccessDataSource):
    """A data set cut or padded with empty documents to a given length."""

    def __init__(self, dataset: Any, full_dataset_length: int, column_name: str):
        """Set the length of a data set.

        Args:
            dataset: The documents: bytes, or dictionaries of columns.
            full_dataset_length: The new number of documents.
            column_name: The column of the documents, where they have columns.
        """
        self._dataset = dataset
        self._length = full_dataset_length
        self._column_name = column_name

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, record_key: SupportsIndex) -> Any:
        index = range(self._length)[record_key]
        return self._dataset[index] if index < len(self._dataset) else self.empty_sequence

    @functools.cached_property
    def empty_sequence(self) -> Any:
        """An empty document of the same type as those of the data set."""
        record = self._dataset[0]
        return record[:0] if isinstance(record, bytes) else {self._column_name: record[self._column_name][:0]}


def pad_dataset(dataset: Any, global_batch_size: int, column_name: str) -> PaddedDataset:
    """Pad a data set with empty documents to whole batches."""
    num_batches = -(-len(dataset) // global_batch_size)
    return PaddedDataset(dataset, num_batches * global_batch_size, column_name)


@dataclasses.dataclass
class _UnlessEmpty(grain.transforms.Map):
    """Applies a function to one column; empty documents stay empty, without special tokens."""

    function: Callable[[dict[str, Any]], dict[str, Any]]
    column_name: str

    def map(self, element: Mapping[str, Any]) -> Any:
        content = element[self.column_name]
        return self.function({self.column_name: content}) if len(content) else {self.column_name: []}


@dataclasses.dataclass
class _Cut(grain.experimental.FlatMapTransform):
    """Cuts documents into pieces of at most `max_length` tokens."""

    max_length: int
    keep_empty: bool
    """Whether an empty document becomes one empty piece, or no piece."""

    def flat_map(self, element: Mapping[str, Any]) -> list[dict[str, Any]]:
        length = max(len(element["targets"]), int(self.keep_empty))
        starts = range(0, length, self.max_length)
        return [{name: element[name][start : start + self.max_length] for name in TOKEN_KEYS} for start in starts]


def _parse_records(dataset: Any, column_name: str, tokenize: bool) -> list[grain.transforms.Map]:
    """Return the transforms from documents to columns, chosen by the first document."""
    if not len(dataset):
        raise ValueError("The data set has no documents.")
    document = dataset[0]
    if isinstance(document, bytes):
        return [ParseArrayRecords(column_name) if tokenize else ParseTokenizedArrayRecords(column_name)]
    if column_name not in document:
        raise ValueError(f"The data set has no column {column_name!r}, but {', '.join(document)}.")
    return []
