"""Per-host toolbox on grain: batches in which each host reads its own part of the documents in its own order.

`create_data_iterator` uses `xlstm_jax.dataset.order` instead, with one order for any number of hosts. Worker processes
can prepare rows; the process of the host makes batches of them. Without packing, the order is the same for any number
of workers. With packing it is not, because each worker fills its own rows: resume a state with the number of workers
that it was saved with.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import grain
from absl import flags
from jax.sharding import Mesh

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.grain_batch_rampup import batch_dataset_with_rampup
from xlstm_jax.dataset.grain_transforms import (
    TOKEN_KEYS,
    CollateToBatch,
    InferSegmentations,
    PadToMaxLength,
    ReformatLazyPacking,
    ShiftData,
)
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator

LOGGER = logging.getLogger(__name__)

_MIN_SHARED_BYTES = 2**20
"""Workers send smaller arrays directly: shared memory costs more than copying the arrays of a row."""


def make_grain_llm_iterator(
    dataloading_host_index: int,
    dataloading_host_count: int,
    global_mesh: Mesh,
    dataset: Any,
    global_batch_size: int,
    max_target_length: int,
    shuffle: bool,
    data_shuffle_seed: int,
    num_epochs: int | None = None,
    operations: Sequence[grain.transforms.Map] | None = None,
    grain_packing: bool = False,
    grain_packing_bin_count: int | None = None,
    shift: bool = True,
    shift_target: bool = True,
    eod_token_id: int = 0,
    worker_count: int = 1,
    worker_buffer_size: int = 1,
    apply_padding: bool = True,
    drop_remainder: bool = True,
    batch_class: type = LLMBatch,
    reset_after_epoch: bool = False,
    use_thread_prefetch: bool = False,
    batch_rampup_factors: Mapping[Any, float] | None = None,
) -> MultiHostDataLoadIterator:
    """Make global batches of documents.

    The arguments are those of `make_grain_llm_dataset`, for the rows, and of `make_grain_multihost_iterator`, for the
    batches. An epoch has as many rows as there are documents, also where several documents share a row.
    """
    is_even = not (grain_packing or batch_rampup_factors) and (drop_remainder or len(dataset) % global_batch_size == 0)
    if dataloading_host_count > 1 and num_epochs is not None and not is_even:
        LOGGER.warning(
            "With num_epochs=%d, the rows of the %d hosts can end at different steps, and a host that continues waits "
            "for ever. Set num_epochs=None: epochs still end, all at the same step.",
            num_epochs,
            dataloading_host_count,
        )
    rows = make_grain_llm_dataset(
        dataloading_host_index=dataloading_host_index,
        dataloading_host_count=dataloading_host_count,
        dataset=dataset,
        global_batch_size=global_batch_size,
        max_target_length=max_target_length,
        shuffle=shuffle,
        data_shuffle_seed=data_shuffle_seed,
        num_epochs=num_epochs,
        operations=operations,
        grain_packing=grain_packing,
        grain_packing_bin_count=grain_packing_bin_count,
        shift=shift,
        shift_target=shift_target,
        eod_token_id=eod_token_id,
        apply_padding=apply_padding,
    )
    return make_grain_multihost_iterator(
        grain_datasets=rows,
        dataset_lengths=len(dataset),
        global_mesh=global_mesh,
        global_batch_size=global_batch_size,
        dataloading_host_count=dataloading_host_count,
        worker_count=worker_count,
        worker_buffer_size=worker_buffer_size,
        drop_remainder=drop_remainder,
        batch_class=batch_class,
        reset_after_epoch=reset_after_epoch,
        use_thread_prefetch=use_thread_prefetch,
        batch_rampup_factors=batch_rampup_factors,
    )


def make_grain_llm_dataset(
    dataloading_host_index: int,
    dataloading_host_count: int,
    dataset: Any,
    global_batch_size: int,
    max_target_length: int,
    shuffle: bool,
    data_shuffle_seed: int,
    num_epochs: int | None = None,
    operations: Sequence[grain.transforms.Map] | None = None,
    grain_packing: bool = False,
    grain_packing_bin_count: int | None = None,
    shift: bool = True,
    shift_target: bool = True,
    eod_token_id: int = 0,
    apply_padding: bool = True,
) -> grain.IterDataset:
    """Make rows from the documents of a host.

    Args:
        dataloading_host_index: The index of this host.
        dataloading_host_count: The number of hosts that read the documents.
        dataset: The documents of all hosts, with a length and indexing. After the operations, each is a dictionary of
            the arrays `inputs` and `targets`.
        global_batch_size: The number of rows in a batch of all hosts.
        max_target_length: The number of tokens in a row. A longer document is an error with packing; without packing,
            its row is longer.
        shuffle: Shuffle the documents, differently in each epoch, and packed rows.
        data_shuffle_seed: The seed of the order, together with the index of the host.
        num_epochs: The number of passes over the documents; `None` for endless.
        operations: The transforms applied to each document, in this order.
        grain_packing: Pack several documents into a row, each into the first row with room. Otherwise each document is
            a row.
        grain_packing_bin_count: The number of rows filled at a time; by default, those of this host in a batch.
        shift: Make each target the token after its input.
        shift_target: Shift targets left, for documents that start with a special token; otherwise inputs right, for
            documents that end with one.
        eod_token_id: The token that ends documents, and the first input of a row if inputs are shifted. Without
            packing, each further one within a document starts a new segment.
        apply_padding: Without packing, pad each row to `max_target_length`.

    Returns:
        Rows with the arrays of an `LLMBatch`.
    """
    documents = read_documents(
        dataset,
        dataloading_host_index=dataloading_host_index,
        dataloading_host_count=dataloading_host_count,
        shuffle=shuffle,
        data_shuffle_seed=data_shuffle_seed,
        num_epochs=num_epochs,
        operations=operations or (),
    )
    if grain_packing:
        rows = pack_documents(
            documents,
            max_target_length,
            num_bins=grain_packing_bin_count or local_batch_size(global_batch_size, dataloading_host_count),
            shuffle=shuffle,
            seed=data_shuffle_seed + dataloading_host_index,
        )
    else:
        rows = documents.map(PadToMaxLength(max_target_length)) if apply_padding else documents
    if not shift:
        return rows
    shifted = rows.map(ShiftData(shift_target=shift_target, eod_token_id=eod_token_id, axis=0))
    return shifted if grain_packing else shifted.map(InferSegmentations(eod_token_id))


def make_grain_multihost_iterator(
    grain_datasets: Sequence[grain.IterDataset] | grain.IterDataset,
    dataset_lengths: Sequence[int] | int,
    global_mesh: Mesh,
    global_batch_size: int,
    dataloading_host_count: int,
    dataset_weights: Sequence[float] | None = None,
    worker_count: int = 1,
    worker_buffer_size: int = 1,
    drop_remainder: bool = True,
    batch_class: type = LLMBatch,
    reset_after_epoch: bool = False,
    use_thread_prefetch: bool = False,
    batch_rampup_factors: Mapping[Any, float] | None = None,
) -> MultiHostDataLoadIterator:
    """Make global batches from the rows of all hosts.

    Args:
        grain_datasets: The rows of this host, or several data sets of them that are mixed.
        dataset_lengths: The number of rows of each data set, over all hosts. An epoch ends when every data set has been
            read at least once.
        global_mesh: The mesh; the rows of a batch are sharded over all of its devices.
        global_batch_size: The number of rows in a batch of all hosts.
        dataloading_host_count: The number of hosts.
        dataset_weights: The proportions of rows from the data sets; equal by default.
        worker_count: The number of processes that prepare rows; 0 for none. They import the main script: start
            training there under `if __name__ == "__main__":`.
        worker_buffer_size: The number of batches that a worker, or the thread, prepares ahead.
        drop_remainder: Drop the last rows if they do not fill a batch.
        batch_class: The class of batches, called with keywords.
        reset_after_epoch: Start every epoch with the same batches.
        use_thread_prefetch: Prepare batches in a thread instead of processes.
        batch_rampup_factors: Factors of the number of rows in a batch, by the step from which they apply. The number of
            batches in an epoch stays the same.

    Returns:
        An iterator whose state JSON can hold.
    """
    datasets = [grain_datasets] if isinstance(grain_datasets, grain.IterDataset) else grain_datasets
    lengths = [dataset_lengths] if isinstance(dataset_lengths, int) else dataset_lengths
    weights = [1.0] * len(datasets) if dataset_weights is None else dataset_weights
    num_rows = _epoch_rows(datasets, lengths, weights)
    num_batches = (num_rows if drop_remainder else num_rows + global_batch_size - 1) // global_batch_size
    if not num_batches:
        raise ValueError(
            f"An epoch would have no batch: {num_rows} rows are fewer than global_batch_size {global_batch_size}. Use "
            "smaller batches, or set drop_remainder=False."
        )

    batch_size = local_batch_size(global_batch_size, dataloading_host_count)
    rows = datasets[0] if len(datasets) == 1 else grain.IterDataset.mix(datasets, weights)
    if worker_count and not use_thread_prefetch:
        rows = prefetch_in_processes(rows, worker_count, worker_buffer_size * batch_size)
    batches = batch_dataset_with_rampup(
        rows, batch_size, drop_remainder=drop_remainder, boundaries_and_scales=batch_rampup_factors
    ).map(CollateToBatch(batch_class))
    if use_thread_prefetch:
        batches = grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=worker_buffer_size)
    return MultiHostDataLoadIterator(
        batches,
        global_mesh,
        iterator_length=num_batches,
        dataset_size=num_rows,
        reset_after_epoch=reset_after_epoch,
    )


def read_documents(
    dataset: Any,
    *,
    dataloading_host_index: int,
    dataloading_host_count: int,
    shuffle: bool,
    data_shuffle_seed: int,
    num_epochs: int | None = None,
    operations: Sequence[grain.transforms.Map] = (),
) -> grain.IterDataset:
    """Read the documents of a host, epoch after epoch; the arguments are those of `make_grain_llm_dataset`."""
    if len(dataset) < dataloading_host_count:
        raise ValueError(f"{len(dataset)} documents are too few for {dataloading_host_count} hosts: each needs one.")
    documents = shard_grain_dataset(
        grain.MapDataset.source(dataset), dataloading_host_index, dataloading_host_count
    ).seed(data_shuffle_seed + dataloading_host_index)
    if shuffle:
        documents = documents.shuffle()
    return documents.repeat(num_epochs).apply(operations).to_iter_dataset()


def shard_grain_dataset(
    grain_dataset: grain.MapDataset, dataloading_host_index: int, dataloading_host_count: int
) -> grain.MapDataset:
    """Return the contiguous part of a data set that a host reads; the first parts may be longer by one."""
    if not 0 <= dataloading_host_index < dataloading_host_count:
        raise ValueError(
            f"There is no host {dataloading_host_index} among {dataloading_host_count}: they count from 0."
        )
    length, num_longer = divmod(len(grain_dataset), dataloading_host_count)
    start = dataloading_host_index * length + min(dataloading_host_index, num_longer)
    return grain_dataset[start : start + length + (dataloading_host_index < num_longer)]


def pack_documents(
    documents: grain.IterDataset, max_target_length: int, *, num_bins: int, shuffle: bool, seed: int
) -> grain.IterDataset:
    """Pack several documents into each row.

    Args:
        documents: Dictionaries of the arrays `inputs` and `targets`.
        max_target_length: The number of tokens in a row.
        num_bins: The number of rows filled at a time. Each document goes into the first row with room; if there is
            none, all of these rows are finished.
        shuffle: Shuffle the rows that are finished together.
        seed: The seed of their order.

    Returns:
        Rows with the arrays of an `LLMBatch`, whose segments are the documents.
    """
    packed = grain.experimental.FirstFitPackIterDataset(
        documents.map(_CheckLength(max_target_length)),
        length_struct=dict.fromkeys(TOKEN_KEYS, max_target_length),
        num_packing_bins=num_bins,
        shuffle_bins=shuffle,
        seed=seed,
    )
    return packed.map(ReformatLazyPacking())


def local_batch_size(global_batch_size: int, dataloading_host_count: int) -> int:
    """Return the number of rows of a batch on each host."""
    size, rest = divmod(global_batch_size, dataloading_host_count)
    if rest:
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of the {dataloading_host_count} hosts."
        )
    return size


class _CheckLength(grain.transforms.Map):
    def __init__(self, max_length: int):
        self._max_length = max_length

    def map(self, element: Mapping[str, Any]) -> Any:
        length = max(len(element[name]) for name in TOKEN_KEYS)
        if length > self._max_length:
            raise ValueError(
                f"A document of {length} tokens does not fit into a row of max_target_length {self._max_length}: cut "
                "documents before they are packed."
            )
        return element


def _epoch_rows(datasets: Sequence[grain.IterDataset], lengths: Sequence[int], weights: Sequence[float]) -> int:
    """Return the number of rows drawn until each data set has been read at least once."""
    if not len(datasets) == len(lengths) == len(weights):
        raise ValueError(
            f"{len(datasets)} data sets come with {len(lengths)} lengths and {len(weights)} weights: each needs one."
        )
    if min(weights) <= 0:
        raise ValueError(f"dataset_weights are {weights}, but must be positive: leave out data sets without rows.")
    return max(int(length * sum(weights) / weight) for length, weight in zip(lengths, weights, strict=True))


def prefetch_in_processes(rows: grain.IterDataset, num_workers: int, buffer_size: int) -> grain.IterDataset:
    """Prepare rows in worker processes, each `buffer_size` of them ahead."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # grain asks for flags of its own, which only programs of absl parse.
    options = grain.experimental.DatasetOptions(min_shm_size=_MIN_SHARED_BYTES)
    return grain.experimental.WithOptionsIterDataset(rows, options).mp_prefetch(
        grain.MultiprocessingOptions(num_workers=num_workers, per_worker_buffer_size=buffer_size)
    )
