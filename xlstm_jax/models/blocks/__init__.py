"""What the system knows about each kind of block, and the registry that every other part reads."""

from xlstm_jax.models.blocks.kind import BlockKind, Kernel, StateCapacity, block_kind, register_block_kind

__all__ = ["BlockKind", "Kernel", "StateCapacity", "block_kind", "register_block_kind"]
