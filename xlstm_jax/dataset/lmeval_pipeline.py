"""Batches of requests of the evaluation harness lm-eval, sorted by length with the longest first."""

# A data set or transform names its argument after what it takes; grain passes it by position.
# pyright: reportIncompatibleMethodOverride=false

import abc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jax.sharding import Mesh

from xlstm_jax.dataset.batch import LLMIndexedBatch
from xlstm_jax.dataset.grain_iterator import local_batch_size, prefetch_in_processes, shard_grain_dataset
from xlstm_jax.dataset.grain_transforms import TOKEN_KEYS, CollateToBatch, HFPrefixTokenize, InferSegmentations
from xlstm_jax.dataset.lmeval_dataset import document_tokens, split_request
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator
from xlstm_jax.dataset.tokenizers.loading import load_tokenizer


class ParseLMEval(grain.transforms.Map):
    """Reads the texts of a request; see `split_request`.

    Args:
        request_name: The key of the request in the items.
    """

    def __init__(self, request_name: str = "req"):
        self.request_name = request_name

    def map(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return `prefix` and `text` in place of the request."""
        rest = {name: value for name, value in item.items() if name != self.request_name}
        return {**rest, **split_request(item[self.request_name])}


class CompleteLLMIndexedBatch(grain.transforms.Map):
    """Adds the positions and indices of a row of an `LLMIndexedBatch`."""

    @staticmethod
    def map(item: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the only row of a document, whose index `idx` counts from 1."""
        rest = {name: value for name, value in item.items() if name != "idx"}
        positions = {f"{name}_position": np.arange(len(item[name]), dtype=np.int32) for name in TOKEN_KEYS}
        indices = {"document_idx": np.array(item["idx"], np.int32), "sequence_idx": np.array(0, np.int32)}
        return {**rest, **positions, **indices}


def empty_llm_indexed_sample() -> dict[str, np.ndarray]:
    """Return a row without tokens, of document 0, which is padding."""
    empty = np.zeros(0, np.int32)
    tokens = {name + suffix: empty for name in TOKEN_KEYS for suffix in ("", "_segmentation")}
    return CompleteLLMIndexedBatch.map({"idx": 0, **tokens})


def token_length(item: Mapping[str, np.ndarray]) -> int:
    """Return the number of inputs of a row."""
    return len(item["inputs"])


class _Elements(grain.MapDataset):
    """A data set defined by its elements at the indices below its length."""

    def __getitem__(self, idx: int | slice) -> Any:
        return self.slice(idx) if isinstance(idx, slice) else self._element(idx % len(self))

    @abc.abstractmethod
    def _element(self, index: int) -> Any: ...


class PadBatchDataset(_Elements):
    """Pads a data set with copies of an element.

    Args:
        dataset: The data set.
        multiple_of: The length becomes a multiple of it.
        min_length: The length becomes at least this.
        pad_elem: The element to append.
    """

    def __init__(self, dataset: grain.MapDataset, multiple_of: int, min_length: int, pad_elem: Any):
        super().__init__(dataset)
        self._pad_elem = pad_elem
        self._length = _round_up(max(len(dataset), min_length), multiple_of)

    def _element(self, index: int) -> Any:
        return self._parent[index] if index < len(self._parent) else self._pad_elem

    def __len__(self) -> int:
        return self._length


class PadSequenceInBatchDataset(_Elements):
    """Makes padded batches from rows of different lengths.

    Args:
        dataset: The rows, as dictionaries.
        batch_size: The number of rows in a batch; the last batch is padded with rows.
        multiple_of: The number of columns is a multiple of it.
        pad_value: The padding value.
    """

    def __init__(self, dataset: grain.MapDataset, batch_size: int, multiple_of: int = 64, pad_value: int = 0):
        super().__init__(dataset)
        self._batch_size = batch_size
        self._options = {"multiple_of": multiple_of, "pad_value": pad_value, "batch_size_pad": batch_size}

    def _element(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._batch_size
        rows: list[Any] = [self._parent[i] for i in range(start, min(start + self._batch_size, len(self._parent)))]
        return {name: _pad_batch_multiple([row[name] for row in rows], **self._options) for name in rows[0]}

    def __len__(self) -> int:
        return -(-len(self._parent) // self._batch_size)


class SortedDataset(_Elements):
    """Sorts elements stably. All of them are read once, when it is created.

    Args:
        dataset: The data set.
        key: Returns the sort key of an element.
        reverse: Sort in descending order.
    """

    def __init__(self, dataset: grain.MapDataset, key: Callable[[Any], Any], reverse: bool = False):
        super().__init__(dataset)
        self._order = sorted(range(len(dataset)), key=lambda index: key(dataset[index]), reverse=reverse)

    def _element(self, index: int) -> Any:
        return self._parent[self._order[index]]

    def __len__(self) -> int:
        return len(self._order)


class MultihostSortedRemapDataset(_Elements):
    """Distributes a sorted data set over hosts, such that their batches at a step have nearly the same lengths.

    Each host reads one contiguous part of the result, in batches. The first batches of all hosts together are the first
    global batch of the sorted data, whose elements are dealt to the hosts round-robin, and so on.

    Args:
        dataset: The sorted data; its length is a multiple of the batch size.
        global_batch_size: The number of elements in the batches of all hosts; a multiple of the number of hosts.
        dataloader_host_count: The number of hosts.
    """

    def __init__(self, dataset: grain.MapDataset, global_batch_size: int, dataloader_host_count: int):
        super().__init__(dataset)
        if global_batch_size % dataloader_host_count or len(dataset) % global_batch_size:
            raise ValueError(
                f"{len(dataset)} elements in batches of {global_batch_size} cannot be distributed over "
                f"{dataloader_host_count} hosts: the batch size has to be a multiple of the number of hosts, and the "
                "number of elements one of the batch size. PadBatchDataset appends elements."
            )
        self._global_batch_size = global_batch_size
        self._num_hosts = dataloader_host_count

    def _element(self, index: int) -> Any:
        host, in_host = divmod(index, len(self) // self._num_hosts)
        step, row = divmod(in_host, self._global_batch_size // self._num_hosts)
        return self._parent[step * self._global_batch_size + row * self._num_hosts + host]

    def __len__(self) -> int:
        return len(self._parent)


def lmeval_preprocessing_pipeline(
    dataloading_host_index: int,
    dataloading_host_count: int,
    global_mesh: Mesh,
    dataset: Sequence[Any],
    global_batch_size: int,
    tokenizer_path: str,
    hf_access_token: str | None = None,
    tokenizer_cache_dir: str | Path | None = None,
    eos_token_id: int | None = None,
    bos_token_id: int | None = None,
    worker_count: int = 1,
    worker_buffer_size: int = 1,
    padding_multiple: int = 128,
    use_thread_prefetch: bool = False,
) -> MultiHostDataLoadIterator:
    """Make batches of requests, one row per request.

    Every host tokenises all requests to sort them, and loads its share of each batch. Rows of document 0 pad the last
    batch.

    Args:
        dataloading_host_index: The index of this host among those that load data.
        dataloading_host_count: The number of those hosts.
        global_mesh: The mesh that batches are sharded over.
        dataset: The requests, each an `Instance` of lm-eval.
        global_batch_size: The number of rows in a batch of all hosts.
        tokenizer_path: The tokenizer, as for `load_tokenizer`.
        hf_access_token: The token for the Hugging Face hub.
        tokenizer_cache_dir: The folder of downloaded tokenizers.
        eos_token_id: The input that starts a new document within a request; by default, that of the tokenizer.
        bos_token_id: The first token of each request; by default, that of the tokenizer.
        worker_count: The number of worker processes; 0 for none.
        worker_buffer_size: The number of batches that a worker or thread prepares ahead.
        padding_multiple: The number of columns of a batch is a multiple of it.
        use_thread_prefetch: Prepare batches in a thread instead of worker processes.

    Returns:
        An iterator over `LLMIndexedBatch`es, in which the documents are the requests and count from 1.
    """
    tokenizer = load_tokenizer(
        tokenizer_path, add_bos=False, add_eos=False, hf_access_token=hf_access_token, cache_dir=tokenizer_cache_dir
    )
    bos_token_id, eos_token_id = document_tokens(tokenizer, bos_token_id, eos_token_id)
    batch_size = local_batch_size(global_batch_size, dataloading_host_count)
    requests = grain.MapDataset.source([{"idx": index, "req": request} for index, request in enumerate(dataset, 1)])
    rows = (
        requests.map(ParseLMEval())
        .map(HFPrefixTokenize(tokenizer, tokenizer, bos_token_id=bos_token_id))
        .map(CompleteLLMIndexedBatch())
    )
    rows = PadBatchDataset(rows, global_batch_size, global_batch_size, empty_llm_indexed_sample())
    rows = SortedDataset(rows, token_length, reverse=True)
    rows = MultihostSortedRemapDataset(rows, global_batch_size, dataloading_host_count)
    rows = shard_grain_dataset(rows, dataloading_host_index, dataloading_host_count)
    batches = PadSequenceInBatchDataset(rows, batch_size, padding_multiple)
    batches = batches.map(InferSegmentations(eos_token_id)).map(CollateToBatch(LLMIndexedBatch))
    num_ahead = worker_buffer_size if use_thread_prefetch else 0
    loader = batches.to_iter_dataset(grain.ReadOptions(num_threads=min(num_ahead, 1), prefetch_buffer_size=num_ahead))
    if worker_count and not use_thread_prefetch:
        loader = prefetch_in_processes(loader, worker_count, worker_buffer_size)
    return MultiHostDataLoadIterator(
        loader, global_mesh, iterator_length=len(batches), dataset_size=len(dataset), pad_shapes=True
    )


def _pad_batch_multiple(
    batch: Sequence[np.ndarray],
    multiple_of: int = 64,
    axis: int = 1,
    pad_value: int | float = 0,
    batch_size_pad: int | None = None,
) -> np.ndarray:
    """Stack arrays of different lengths, with padding.

    Args:
        batch: The arrays; those without the axis are stacked unchanged.
        multiple_of: The length is padded to a multiple of it, and is never 0.
        axis: The axis of the result along which the arrays are padded.
        pad_value: The padding value.
        batch_size_pad: The number of rows to pad to; by default, the number of arrays.

    Returns:
        The stacked array.
    """
    if batch[0].ndim >= axis:
        length = _round_up(max(1, *(array.shape[axis - 1] for array in batch)), multiple_of)
        batch = [_padded(array, axis - 1, length, pad_value) for array in batch]
    stacked = np.stack(batch)
    return stacked if batch_size_pad is None else _padded(stacked, 0, batch_size_pad, pad_value)


def _padded(array: np.ndarray, axis: int, length: int, value: int | float) -> np.ndarray:
    missing = np.zeros((array.ndim, 2), int)
    missing[axis, 1] = length - array.shape[axis]
    return np.pad(array, missing, constant_values=value)


def _round_up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of
