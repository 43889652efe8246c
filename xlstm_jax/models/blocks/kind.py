"""The registry of block kinds: one entry holds everything that depends on the kind of a block."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from flax import linen as nn

from xlstm_jax.common_types import PyTree
from xlstm_jax.models.blocks.activations import BlockActivations, Placement
from xlstm_jax.models.blocks.cost import BlockCost

C = TypeVar("C")
"""The config that the functions of a kind read."""


class Kernel(NamedTuple):
    """The backends of a cell, for `xlstm-jax doctor`."""

    name: str
    backends: tuple[str, ...]
    resolve: Callable[[Any], str]
    """Raises a `ValueError` with the reason if a backend cannot run here."""
    choose: Callable[[], tuple[str, str]]
    """Returns what `auto` picks, and why."""

    def obstacle(self, backend: str) -> str | None:
        """Return why a backend cannot run here, or `None` if it can."""
        try:
            self.resolve(backend)
        except ValueError as error:
            return str(error)
        return None


@dataclasses.dataclass(frozen=True)
class StateCapacity(Generic[C]):
    """The limit of a state that holds tokens, such as a cache of keys and values."""

    max_tokens: Callable[[C], int]
    """Returns the number of tokens that the state can hold."""
    num_held: Callable[[PyTree], jax.Array]
    """Returns the number of tokens that each row of a block's state holds; its last axis is that of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockKind(Generic[C]):
    """A kind of block.

    Model, config validation, `model_cost`, `activation_memory`, planning, the header of a run, `xlstm-jax doctor` and
    decoding read these entries; none of them knows a kind by its name.
    """

    name: str
    """The name in `block_kinds`."""
    config_class: type[C]
    """The config that the functions below read. Stacks of this config and its subclasses can contain the kind."""
    create: Callable[[C], nn.Module]
    """Creates the module `block(x, state, context) -> (x, state)`, unbound (`parent=None`). It accepts the state `None`
    for an empty one."""
    init_state: Callable[[C, int], PyTree]
    """Returns the state before the first token for a batch size; inside a mesh, the part of this device."""
    cost: Callable[[C, int], BlockCost]
    """Returns parameters, state and FLOPs of a block for a sequence length."""
    activations: Callable[[C, Placement], BlockActivations]
    """Returns the bytes of activations for each token."""
    describe_backend: Callable[[C], str] = lambda _: ""
    """Returns the line about the block's kernel in the header of a run; empty if the block has no choice of kernels."""
    kernel: Kernel | None = None
    """The kernel of its cell, if it has a choice of backends."""
    num_heads: Callable[[C], int]
    """Returns the number of heads; the size of the model axis has to divide it."""
    head_sizes: Callable[[C], Mapping[str, int]] = lambda _: {}
    """Returns the widths that have to be positive multiples of `num_heads`, by name."""
    fields: tuple[str, ...] = ()
    """Fields of the config that only some kinds read, this one among them."""
    check: Callable[[C], None] = lambda _: None
    """Raises a `ConfigError` if the config cannot have this kind, beyond `head_sizes`."""
    capacity: StateCapacity[C] | None = None
    """The limit of a state that holds tokens; `None` if the state has no limit."""
    lay_out_for_decoding: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda params: params
    """Returns the parameters of a block in the layout that is fastest for one token at a time."""


_KINDS: dict[str, BlockKind[Any]] = {}


def register_block_kind(kind: BlockKind[Any]) -> BlockKind[Any]:
    """Add a kind of block to the registry.

    A module outside the package calls it when it is imported; a recipe that names a model class of this module in
    `model.model_class` imports it.

    Args:
        kind: The entry. A name can be registered once.

    Returns:
        The entry.
    """
    if kind.name in _KINDS:
        raise ValueError(f"There is a block kind {kind.name!r} already: choose another name.")
    _KINDS[kind.name] = kind
    return kind


def block_kind(name: str) -> BlockKind[Any]:
    """Return the entry of a kind."""
    return _KINDS[name]


def all_kinds() -> tuple[BlockKind[Any], ...]:
    """Return all entries, by their names."""
    return tuple(_KINDS[name] for name in sorted(_KINDS))


def kinds_for(config: Any) -> tuple[str, ...]:
    """Return the names of the kinds that a stack of this config can contain."""
    return tuple(kind.name for kind in all_kinds() if isinstance(config, kind.config_class))
