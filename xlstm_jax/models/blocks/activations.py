"""The activations of a block, in groups that a remat policy saves or recomputes together (`stack.REMAT_POLICIES`)."""

import dataclasses
from typing import NamedTuple


class BlockActivations(NamedTuple):
    """The arrays of a block, in bytes for each token."""

    inputs: int | float
    """The input of the block, which every policy saves."""
    stream: int | float
    """The residual stream between two branches."""
    projections: int | float
    """The outputs of projection matmuls."""
    cell: int | float
    """What the kernel of a cell saves."""
    operands: int | float
    """The inputs of the last matmul of each branch."""
    rest: int | float
    """Norms, convolutions and activations."""
    scanned: int | float = 0
    """What else is saved if blocks are scanned without remat: unrolled, XLA recomputes it within fusions."""
    temporaries: int | float = 0
    """What the backward pass of a cell in plain JAX holds in addition to the saved arrays."""

    @property
    def all(self) -> int | float:
        """All that the backward pass of one block reads."""
        return self.inputs + self.stream + self.projections + self.cell + self.operands + self.rest

    def saved(self, remat: str, is_scanned: bool) -> int | float:
        """Return what the forward pass saves under a remat policy."""
        if remat in ("full", "offload"):
            return self.inputs
        saved = self.inputs + self.stream + self.projections + self.cell
        if remat in ("norms", "none"):
            saved += self.operands
        if remat == "none":
            saved += self.rest + (self.scanned if is_scanned else 0)
        return saved


@dataclasses.dataclass(frozen=True)
class Placement:
    """What the memory of activations depends on, apart from the config."""

    num_tokens: int
    """Tokens of a minibatch on one device."""
    sequence_length: int
    model_axis_size: int = 1
    is_hopper: bool = False
    """Whether the kernels for Hopper GPUs can run."""
    has_flash_attention: bool = False
    """Whether attention saves no weights, as cuDNN's."""
    has_packed_attention: bool = False
    """Whether attention within documents needs no mask of all pairs of positions."""
