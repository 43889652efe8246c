"""Batches that cost nothing, to measure everything else."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.configs import SyntheticDataConfig


class SyntheticDataIterator:
    """Yields the same batch of zeros, `num_batches` times an epoch.

    A `for` loop is an epoch. After `set_state` in the middle of an epoch, the next loop is the rest of it.
    """

    def __init__(self, config: SyntheticDataConfig, mesh: Mesh):
        """Make the batch.

        Args:
            config: The size of a batch and the number of batches.
            mesh: The mesh; the rows of the batch are split over all of its devices.
        """
        if config.max_target_length is None:
            raise ValueError("max_target_length is None, but synthetic rows need a length: set it.")
        if config.global_batch_size % mesh.size:
            raise ValueError(
                f"global_batch_size is {config.global_batch_size}, but must be a multiple of the {mesh.size} devices."
            )
        self.config = config
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        batch = self.raw_generate_synthetic_data(config)
        self._batch = jax.tree.map(
            lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__), batch
        )
        self._step = 0
        self._is_mid_epoch = False

    def __iter__(self) -> "SyntheticDataIterator":
        if not self._is_mid_epoch:
            self._step = 0
        self._is_mid_epoch = False
        return self

    def __next__(self) -> LLMBatch:
        if self._step >= self.config.num_batches:
            raise StopIteration
        self._step += 1
        self._is_mid_epoch = False
        return self._batch

    def __len__(self) -> int:
        return self.config.num_batches

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator is, for JSON."""
        return {"step": self._step, "num_batches": self.config.num_batches}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go to where an iterator with as many batches was."""
        if state["num_batches"] != self.config.num_batches:
            raise ValueError(
                f"The state is from epochs of {state['num_batches']} batches, but num_batches is "
                f"{self.config.num_batches}."
            )
        self._step = state["step"]
        self._is_mid_epoch = 0 < self._step < self.config.num_batches

    @property
    def dataset_size(self) -> int:
        """The number of rows in an epoch."""
        return self.config.num_batches * self.config.global_batch_size

    @staticmethod
    def raw_generate_synthetic_data(config: SyntheticDataConfig) -> LLMBatch:
        """Make a batch on the host: tokens and positions are 0, and every row is one document."""
        zeros, ones = (np.full((config.global_batch_size, config.max_target_length or 0), x, np.int32) for x in (0, 1))
        return LLMBatch(
            inputs=zeros,
            targets=zeros,
            inputs_position=zeros,
            inputs_segmentation=ones,
            targets_position=zeros,
            targets_segmentation=ones,
        )
