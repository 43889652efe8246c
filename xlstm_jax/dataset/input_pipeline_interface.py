"""Create iterators over batches from data configs: the entry to all data."""

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from xlstm_jax.dataset.configs import DataConfig, FormalTaskDataConfig, SyntheticDataConfig, TextDataConfig
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator
from xlstm_jax.dataset.synthetic_dataloading import SyntheticDataIterator
from xlstm_jax.dataset.tasks.batches import make_task_iterator

DataIterator = MultiHostDataLoadIterator | SyntheticDataIterator
"""Yields global batches, epoch after epoch, and has a state from which it can resume."""


def get_process_loading_data(config: DataConfig, mesh: Mesh) -> list[int]:
    """Return the sorted indices of the processes that own rows of the batches; each of them has to load data.

    Args:
        config: The data; its batches are sharded over all devices.
        mesh: The mesh.
    """
    if config.global_batch_size % mesh.size:
        raise ValueError(
            f"global_batch_size is {config.global_batch_size}, but must be a multiple of the {mesh.size} devices."
        )
    return sorted({device.process_index for device in mesh.devices.flat})


def create_data_iterator(config: DataConfig, mesh: Mesh) -> DataIterator:
    """Create an iterator over batches; their order depends on the config alone.

    Args:
        config: The data.
        mesh: The mesh; the rows of a batch are sharded over all of its devices.

    Returns:
        The iterator.
    """
    match config:
        case SyntheticDataConfig():
            return SyntheticDataIterator(config, mesh)
        case FormalTaskDataConfig():
            get_process_loading_data(config, mesh)
            return make_task_iterator(config, mesh)
        case TextDataConfig():
            return create_mixed_data_iterator([config], mesh)
    raise ValueError(f"There is no iterator for a {type(config).__name__}: use a config of xlstm_jax.dataset.")


def create_mixed_data_iterator(
    configs: Sequence[TextDataConfig],
    mesh: Mesh,
    dataset_weights: Sequence[float | int] | None = None,
    weights_at_steps: Mapping[int, Sequence[float | int]] | None = None,
) -> DataIterator:
    """Create an iterator over batches with documents of one or several data sets.

    Args:
        configs: The data sets; their settings of batches must be the same.
        mesh: The mesh; the rows of a batch are sharded over all of its devices.
        dataset_weights: The share of tokens of each data set, in any unit; equal shares by default.
        weights_at_steps: Other weights, by the step from which they apply.

    Returns:
        The iterator.
    """
    from xlstm_jax.dataset.order.pipeline import make_ordered_iterator

    if not configs:
        raise ValueError("There is no data set: give at least one config.")
    get_process_loading_data(configs[0], mesh)
    return make_ordered_iterator(configs, mesh, dataset_weights, weights_at_steps)
