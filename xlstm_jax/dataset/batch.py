"""Batches, which data pipelines yield and loss functions read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import dataclass

dataclass_kwonly = functools.partial(dataclass, kw_only=True)
"""Makes a class a pytree with keyword-only fields, for custom batches."""

Array = jax.Array | Any
"""A leaf of a batch: an array of JAX or NumPy, a shape with a dtype, or any result of a tree map."""


class TokenRange(NamedTuple):
    """The smallest and the largest of some token ids."""

    smallest: int
    largest: int


@dataclass
class Batch:
    """Inputs and targets of a model, batch axis first."""

    inputs: Array
    targets: Array

    def __getitem__(self, key: Any) -> Any:
        """Slice every array; each array uses as many entries of a tuple as it has axes."""
        return jax.tree.map(lambda array: _compute(lambda x: x[_truncated(key, x.ndim)], array), self)


@dataclass(kw_only=True)
class LLMBatch(Batch):
    """Packed token sequences for next-token prediction, all of shape (batch, length).

    A row can hold several documents in sequence. The segmentation counts them from 1 and is 0 for padding; the position
    counts the tokens of each document from 0. For the documents "a b c" and "d e", a row of length 7 has

        inputs               0 a b 0 d 0 0
        targets              a b c d e 0 0
        segmentation         1 1 1 2 2 0 0
        position             0 1 2 0 1 0 0
        document borders     1 0 0 1 0 1 0

    Borders are the columns at which a recurrent state is reset: the first one, and wherever the segmentation of the
    inputs differs from the previous column.
    """

    inputs_position: Array
    inputs_segmentation: Array
    targets_position: Array
    targets_segmentation: Array
    _document_borders: Array | None = None

    def get_document_borders(self) -> Array:
        """Return the columns at which documents start, as booleans of the shape of the inputs."""
        if self._document_borders is not None:
            return self._document_borders
        return _compute(_find_borders, self.inputs_segmentation)

    def get_borders_of_streams(self) -> Array:
        """Return the borders for a state that is carried over from the same row of the previous batch.

        The first column is a border only if a document starts there; otherwise its position continues that batch.
        """
        borders = self.get_document_borders()
        return _numpy_of(borders).concatenate([self.inputs_position[..., :1] == 0, borders[..., 1:]], axis=-1)

    def __getitem__(self, key: Any) -> Any:
        """Slice every array; each array uses as many entries of a tuple as it has axes.

        The borders are those of the whole batch: a slice that starts inside a document has none in its first column.
        """
        whole = dataclasses.replace(self, _document_borders=self.get_document_borders())
        return Batch.__getitem__(whole, key)

    @staticmethod
    def from_inputs(inputs: Array, targets: Array | None = None) -> "LLMBatch":
        """Make a batch in which every row is one document.

        Args:
            inputs: The tokens, of shape (batch, length).
            targets: The tokens to predict; by default, the inputs, which are then shifted right by one after a 0.

        Returns:
            The batch.
        """
        return LLMBatch(**_document_per_row(inputs, targets))

    @staticmethod
    def get_dtype_struct(batch_size: int, max_length: int) -> "LLMBatch":
        """Return a batch of shapes and dtypes, without arrays."""
        return LLMBatch(**_token_structs(batch_size, max_length))

    @classmethod
    def get_sample(cls, batch_size: int, max_length: int) -> "LLMBatch":
        """Return a batch of zero tokens in which every row is one document."""
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), cls.get_dtype_struct(batch_size, max_length))
        return dataclasses.replace(zeros, **_document_per_row(zeros.inputs, zeros.targets))


@dataclass(kw_only=True)
class LLMIndexedBatch(LLMBatch):
    """Token sequences with the indices of their documents.

    The indices have shape (batch,). All rows of a document have the same `document_idx`, and are numbered by
    `sequence_idx`; document 0 is padding.
    """

    document_idx: Array
    sequence_idx: Array

    @staticmethod
    def from_inputs(  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs: Array, document_idx: Array, sequence_idx: Array, targets: Array | None = None
    ) -> "LLMIndexedBatch":
        """Make a batch in which every row is one document.

        Args:
            inputs: The tokens, of shape (batch, length).
            document_idx: The document of each row.
            sequence_idx: The index of the row within its document.
            targets: The tokens to predict, as for `LLMBatch.from_inputs`.

        Returns:
            The batch.
        """
        tokens = _document_per_row(inputs, targets)
        return LLMIndexedBatch(**tokens, document_idx=document_idx, sequence_idx=sequence_idx)

    @staticmethod
    def get_dtype_struct(batch_size: int, max_length: int) -> "LLMIndexedBatch":
        """Return a batch of shapes and dtypes, without arrays."""
        index = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        return LLMIndexedBatch(**_token_structs(batch_size, max_length), document_idx=index, sequence_idx=index)


def find_token_ranges(batch: Any) -> dict[str, TokenRange]:
    """Return the ranges of the token ids of the inputs and of the targets of a batch.

    Ids count where the segmentation is not 0; the others are padding or masked, and may be any number, such as -100.

    Args:
        batch: The batch. The local shards of arrays on devices are copied to the host.

    Returns:
        The ranges by field, without fields in which no id counts. Only an `LLMBatch` has ranges.
    """
    if not isinstance(batch, LLMBatch):
        return {}
    ranges = {}
    for name in ("inputs", "targets"):
        tokens, segmentation = (to_host(getattr(batch, name + suffix)) for suffix in ("", "_segmentation"))
        counted = tokens if np.all(segmentation) else tokens[segmentation != 0]
        if counted.size and np.issubdtype(counted.dtype, np.integer):
            ranges[name] = TokenRange(int(counted.min()), int(counted.max()))
    return ranges


def to_host(array: Any) -> np.ndarray:
    """Return an array as a NumPy array; if it is sharded over processes, only the rows of this process."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.concatenate([np.asarray(shard.data) for shard in array.addressable_shards])
    return np.asarray(array)


def _document_per_row(inputs: Array, targets: Array | None) -> dict[str, Array]:
    if targets is None:
        inputs, targets = _compute(_shift_right, inputs), inputs
    return {
        "inputs": inputs,
        "targets": targets,
        "inputs_position": _compute(_positions, inputs),
        "inputs_segmentation": _compute(_ones, inputs),
        "targets_position": _compute(_positions, inputs),
        "targets_segmentation": _compute(_ones, inputs),
    }


def _token_structs(batch_size: int, max_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    struct = jax.ShapeDtypeStruct((batch_size, max_length), jnp.int32)
    tokens = ("inputs", "targets")
    return {name + suffix: struct for suffix in ("", "_position", "_segmentation") for name in tokens}


def _compute(function: Callable[[Array], Array], array: Array) -> Array:
    """Apply a function to an array, or return the shape and dtype of the result for a shape and dtype."""
    return jax.eval_shape(function, array) if isinstance(array, jax.ShapeDtypeStruct) else function(array)


def _truncated(key: Any, ndim: int) -> Any:
    return key[:ndim] if isinstance(key, tuple) else key


def _numpy_of(array: Array) -> Any:
    """Return the library of an array: batches stay on the host until they are put on devices."""
    return np if isinstance(array, np.ndarray) else jnp


def _find_borders(segmentation: Array) -> Array:
    numpy = _numpy_of(segmentation)
    first = numpy.ones_like(segmentation[..., :1], dtype=bool)
    return numpy.concatenate([first, segmentation[..., 1:] != segmentation[..., :-1]], axis=-1)


def _shift_right(tokens: Array) -> Array:
    numpy = _numpy_of(tokens)
    return numpy.concatenate([numpy.zeros_like(tokens[..., :1]), tokens[..., :-1]], axis=-1)


def _positions(tokens: Array) -> Array:
    numpy = _numpy_of(tokens)
    return numpy.tile(numpy.arange(tokens.shape[-1], dtype=numpy.int32), (*tokens.shape[:-1], 1))


def _ones(tokens: Array) -> Array:
    return _numpy_of(tokens).ones(tokens.shape, dtype=np.int32)
