"""Synthetic batches for benchmarks: rows of zeros, or random tokens packed into documents as in training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xlstm_jax.dataset.batch import LLMBatch, TokenRange
from xlstm_jax.dataset.configs import SyntheticDataConfig
from xlstm_jax.dataset.states import check_keys
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary

LENGTH_DEVIATION = 1.0
"""Standard deviation of the logarithm of document lengths, roughly that of web text."""


def draw_packed_batch(
    seed: int | Sequence[int],
    *,
    batch_size: int,
    length: int,
    vocab_size: int,
    mean_document_length: int | None = 1000,
) -> LLMBatch:
    """Draw random tokens, packed into documents as in training, on the host.

    Token `i` has a probability of about 1 / (i + 1), as in text (Zipf's law). Lengths of documents are log-normal. Each
    row starts with a new document and is full; its last document is truncated.

    Args:
        seed: The seed; numbers in a sequence make up one seed.
        batch_size: The number of rows.
        length: The number of tokens in a row.
        vocab_size: The number of different tokens.
        mean_document_length: The mean length of documents before truncation; `None` for one document per row.

    Returns:
        The batch, as NumPy arrays of int32.
    """
    generator = np.random.default_rng(seed)
    uniform = generator.random((batch_size, length))
    # The inverse of the distribution function log(i + 1) / log(vocab_size + 1).
    targets = np.minimum((vocab_size + 1) ** uniform - 1, vocab_size - 1).astype(np.int32)
    is_start = np.zeros((batch_size, length), bool)
    is_start[:, 0] = True
    if mean_document_length is not None:
        for row in is_start:
            row[_draw_document_starts(generator, length, mean_document_length)] = True
    columns = np.arange(length, dtype=np.int32)
    position = columns - np.maximum.accumulate(np.where(is_start, columns, 0), axis=1)
    segmentation = np.cumsum(is_start, axis=1, dtype=np.int32)
    inputs = np.where(is_start, 0, np.roll(targets, 1, axis=1))
    return LLMBatch(
        inputs=inputs,
        targets=targets,
        inputs_position=position,
        inputs_segmentation=segmentation,
        targets_position=position,
        targets_segmentation=segmentation,
    )


def _draw_document_starts(generator: np.random.Generator, length: int, mean_document_length: int) -> np.ndarray:
    """Return the columns of a row at which its second and later documents start."""
    log_mean = math.log(mean_document_length) - LENGTH_DEVIATION**2 / 2
    starts, end = [], 0
    while end < length:
        lengths = np.maximum(1, generator.lognormal(log_mean, LENGTH_DEVIATION, 16).round().astype(np.int64))
        ends = end + np.cumsum(lengths)
        starts.append(ends[ends < length])
        end = int(ends[-1])
    return np.concatenate(starts)


def synthetic_vocabulary(config: SyntheticDataConfig) -> Vocabulary:
    """Return the vocabulary of synthetic batches; rows of zeros have one token."""
    return Vocabulary(config.vocab_size or 1, "synthetic tokens")


class SyntheticDataIterator:
    """Yields synthetic batches, `num_batches` in an epoch.

    Without a `vocab_size` in the config, all batches are the same zeros, which stay on the devices. With one, batch `i`
    of every epoch is drawn from the seed of the config and `i`.

    A `for` loop is an epoch. After `set_state` in the middle of an epoch, the next loop is the rest of that epoch.
    """

    def __init__(self, config: SyntheticDataConfig, mesh: Mesh):
        """Create the batch if all batches are the same.

        Args:
            config: The size, number and content of batches.
            mesh: The mesh; the rows of the batch are sharded over all of its devices.
        """
        if config.max_target_length is None:
            raise ValueError("max_target_length is None, but synthetic rows need a length: set it.")
        if config.global_batch_size % mesh.size:
            raise ValueError(
                f"global_batch_size is {config.global_batch_size}, but must be a multiple of the {mesh.size} devices."
            )
        self.config = config
        self.vocabulary = synthetic_vocabulary(config)
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        is_constant = config.vocab_size is None
        self._constant_batch = self._place(self.raw_generate_synthetic_data(config)) if is_constant else None
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
        if self._constant_batch is not None:
            return self._constant_batch
        return self._place(self._draw(self._step))

    def __len__(self) -> int:
        return self.config.num_batches

    def get_state(self) -> dict[str, Any]:
        """Return the position of the iterator, for JSON."""
        return {"step": self._step, "num_batches": self.config.num_batches}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume the state of an iterator with as many batches."""
        check_keys(state, "step", "num_batches")
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

    @property
    def token_ranges(self) -> dict[str, TokenRange]:
        """The token ids that a batch can hold."""
        return dict.fromkeys(("inputs", "targets"), TokenRange(0, self.vocabulary.size - 1))

    def _draw(self, step: int) -> LLMBatch:
        config = self.config
        assert config.vocab_size is not None
        assert config.max_target_length is not None
        return draw_packed_batch(
            (config.data_shuffle_seed, step),
            batch_size=config.global_batch_size,
            length=config.max_target_length,
            vocab_size=config.vocab_size,
            mean_document_length=config.mean_document_length,
        )

    def _place(self, batch: LLMBatch) -> LLMBatch:
        return jax.tree.map(
            lambda array: jax.make_array_from_callback(array.shape, self._sharding, array.__getitem__), batch
        )

    @staticmethod
    def raw_generate_synthetic_data(config: SyntheticDataConfig) -> LLMBatch:
        """Make a constant batch on the host: tokens and positions are 0, and every row is one document."""
        zeros, ones = (np.full((config.global_batch_size, config.max_target_length or 0), x, np.int32) for x in (0, 1))
        return LLMBatch(
            inputs=zeros,
            targets=zeros,
            inputs_position=zeros,
            inputs_segmentation=ones,
            targets_position=zeros,
            targets_segmentation=ones,
        )
