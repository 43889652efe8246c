"""Make the iterator of text data: configs to global batches, in an order that depends on seed and step alone."""

import math
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import Mesh

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import TextDataConfig
from xlstm_jax.dataset.grain_batch_rampup import create_batch_rampup_schedule
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator, rows_of_process
from xlstm_jax.dataset.order.batches import BatchOrder, OrderedBatches
from xlstm_jax.dataset.order.mixture import WeightSchedule
from xlstm_jax.dataset.sources.records import holds_tokens
from xlstm_jax.dataset.sources.registry import first_input, open_source
from xlstm_jax.dataset.sources.source import Source

_SHARED = (
    *("global_batch_size", "max_target_length", "packing_name", "grain_packing_bin_count"),
    *("batch_rampup_factors", "max_steps_per_epoch"),
)
"""The fields that must be the same for all data sets of a mixture."""


def make_ordered_iterator(
    configs: Sequence[TextDataConfig],
    global_mesh: Mesh,
    weights: Sequence[float | int] | None = None,
    weights_at_steps: Mapping[int, Sequence[float | int]] | None = None,
) -> MultiHostDataLoadIterator:
    """Make an iterator over the global batches of some data sets.

    Args:
        configs: The data sets; their settings of batches must be the same.
        global_mesh: The mesh; the rows of a batch are sharded over all of its devices.
        weights: The share of tokens of each data set, in any unit; equal shares by default.
        weights_at_steps: Other weights, by the step from which they apply.

    Returns:
        The iterator. A single data set with `drop_remainder=False` ends after each pass over its documents. Otherwise
        the data is endless, and an epoch ends when every data set has been read once more; the epoch has a length if
        the number of tokens is known beforehand. Without packing, an epoch has as many rows as there are documents: if
        documents are longer than a row, it is only a part of the data.
    """
    _check_configs(configs)
    config = configs[0]
    # A process that skips a document which the others can read would no longer agree with them.
    is_alone = {device.process_index for device in global_mesh.devices.flat} == {jax.process_index()}
    sources = [
        open_source(each, name, skips_unreadable=is_alone) for each, name in zip(configs, _names(configs), strict=True)
    ]
    _check_sources(sources)
    schedule = WeightSchedule(len(sources), weights, weights_at_steps)
    is_endless = len(configs) > 1 or config.drop_remainder
    length = _epoch_length(config, sources, schedule(0)) if is_endless else None
    batches = OrderedBatches(
        sources,
        BatchOrder(
            length=config.max_target_length or 0,
            num_rows=_row_schedule(config, global_mesh),
            packing=config.packing_name,
            num_bins=config.grain_packing_bin_count or config.global_batch_size,
            weights=schedule,
            is_endless=is_endless,
            stops_after_pass=is_endless and length is None,
            first_input=first_input(config, sources[0]),
        ),
        own_rows=lambda num_rows: rows_of_process(global_mesh, num_rows),
        num_workers=max(map(_num_workers, configs)),
        description={
            "global_batch_size": config.global_batch_size,
            "batch_rampup_factors": {str(k): v for k, v in (config.batch_rampup_factors or {}).items()},
        },
    )
    return MultiHostDataLoadIterator(
        batches,
        global_mesh,
        iterator_length=min(filter(None, [length, config.max_steps_per_epoch]), default=None),
        dataset_size=sum(len(source.documents) for source in sources),
        reset_after_epoch=not is_endless and not config.shuffle_data,
        prefetch=config.worker_buffer_size,
        length_is_upper_bound=length is None,
        vocabulary=next((source.vocabulary for source in sources if source.vocabulary is not None), None),
    )


def _check_configs(configs: Sequence[TextDataConfig]) -> None:
    if not configs:
        raise ValueError("There is no data set: give at least one config.")
    if configs[0].max_target_length is None:
        raise ValueError("max_target_length is None, but rows need a length: set it.")
    names = _names(configs)
    if len(set(names)) < len(names):
        raise ValueError(f"The data sets of a mixture must have different names, but they are called {names}.")
    for name in _SHARED:
        values = [getattr(config, name) for config in configs]
        if any(value != values[0] for value in values):
            raise ValueError(f"All data sets of a mixture must have the same {name}, but they have {values}.")


def _check_sources(sources: Sequence[Source]) -> None:
    vocabularies = [source.vocabulary for source in sources if source.vocabulary is not None]
    digests = {vocabulary.digest for vocabulary in vocabularies} - {None}
    ends = {source.eod_token_id for source in sources}
    if len(digests) > 1 or len(ends) > 1:
        names = "; ".join(vocabulary.description for vocabulary in vocabularies)
        raise ConfigError(
            f"The data sets of a mixture must have the same tokens, but their tokenizers ({names}) or their ends of "
            f"documents ({', '.join(map(str, ends))}) differ."
        )


def _names(configs: Sequence[TextDataConfig]) -> list[str]:
    return [config.name or str(index) for index, config in enumerate(configs)]


def _num_workers(config: TextDataConfig) -> int:
    return 0 if holds_tokens(config) else config.worker_count


def _row_schedule(config: TextDataConfig, mesh: Mesh) -> Callable[[int], int]:
    factors = config.batch_rampup_factors
    schedule = create_batch_rampup_schedule(config.global_batch_size, "stepwise", factors)
    for step in (0, *map(int, factors or ())):
        if schedule(step) % mesh.size:
            raise ValueError(
                f"From step {step} on, a batch has {schedule(step)} rows, but it must be a multiple of the {mesh.size} "
                "devices: change global_batch_size or batch_rampup_factors."
            )
    return schedule


def _epoch_length(config: TextDataConfig, sources: Sequence[Source], shares: Sequence[float]) -> int | None:
    """Return the number of batches in an epoch, if it is known: one pass over the tokens of each source.

    Without packing, every document counts as one row, whatever its length.
    """
    if config.packing_name == "none":
        sizes, batch_size = [len(source.documents) for source in sources], config.global_batch_size
    else:
        sizes = [source.num_tokens for source in sources]
        batch_size = config.global_batch_size * (config.max_target_length or 1)
    if None in sizes:
        return None
    num_units = max((size or 0) / share for size, share in zip(sizes, shares, strict=True) if share)
    return max(math.floor(num_units) // batch_size, 1)
