"""The exact persistent memory per device, from the shapes and shardings of the state."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding

from xlstm_jax.common_types import PyTree
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.utils.partitioned import axes_of, is_partitioned, unboxed
from xlstm_jax.utils.pytree_utils import flatten_pytree

LOGIT_BYTES = 4
"""Logits are float32."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter with its sharding."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    """The mesh axes that each dimension is sharded over."""
    num_bytes: int
    """Bytes per device."""

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that the parameter is sharded over."""
        return tuple(axis for axes in self.spec for axis in axes)


@dataclasses.dataclass(frozen=True)
class PersistentMemory:
    """The bytes per device that are held throughout a run."""

    parameters: int
    optimizer: int
    other: int
    """Step, random key, metrics, the record of bad steps and variables that are not parameters."""
    batch: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.parameters + self.optimizer + self.other + self.batch


def persistent_memory(trainer: AbstractTrainer) -> PersistentMemory:
    """Return the memory that each device holds between two steps, including the batch of the next one."""
    before = state_memory(trainer)
    return dataclasses.replace(before, other=before.other + bytes_per_device(trainer.train_metrics_shapes))


def state_memory(trainer: AbstractTrainer) -> PersistentMemory:
    """Return the memory that each device holds before the first step, without metrics, which need a traced step."""
    state = trainer.state
    return PersistentMemory(
        parameters=bytes_per_device(state.params),
        optimizer=bytes_per_device(state.opt_state),
        other=bytes_per_device((state.step, state.rng, state.guard, state.mutable_variables)),
        batch=bytes_per_device(trainer.exmp_batch),
    )


def bytes_per_device(tree: PyTree) -> int:
    """Return the bytes per device of a tree of arrays, or of shapes with shardings; they are equal on all devices."""
    return sum(_bytes_on_device(leaf) for leaf in jax.tree.leaves(tree))


def list_parameters(trainer: AbstractTrainer) -> tuple[Parameter, ...]:
    """Return all parameters by name."""
    leaves = flatten_pytree(trainer.state.params, is_leaf=is_partitioned)
    return tuple(_describe(name, unboxed(leaves[name])) for name in sorted(leaves))


def logits_memory(trainer: AbstractTrainer, num_tokens: int) -> int:
    """Return the bytes of the logits that the loss holds at once.

    Args:
        trainer: The trainer.
        num_tokens: The number of tokens in a device's minibatch.

    Returns:
        The bytes for one chunk of tokens and the device's shard of the vocabulary; if logit statistics are logged, for
        all tokens and the full vocabulary. Gradients of logits need the same amount again.
    """
    shape: Any = trainer.model_config.model_config
    if trainer.trainer_config.log_logit_stats:
        return num_tokens * shape.vocab_size * LOGIT_BYTES
    num_parts = trainer.mesh.shape[trainer.model_axis_name]
    return min(shape.loss_chunk_size, num_tokens) * shape.vocab_size // num_parts * LOGIT_BYTES


def _bytes_on_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _describe(name: str, leaf: Any) -> Parameter:
    sharding: NamedSharding = leaf.sharding
    sizes = sharding.mesh.shape
    spec = tuple(tuple(axis for axis in axes_of(entry) if sizes[axis] > 1) for entry in sharding.spec)
    spec += ((),) * (len(leaf.shape) - len(spec))
    return Parameter(name, tuple(leaf.shape), str(leaf.dtype), spec, _bytes_on_device(leaf))
