"""From hidden states to logits, and to the losses of targets without ever holding all logits."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.distributed.array_utils import axis_index, axis_size, gather_whole, split_array_over_mesh
from xlstm_jax.distributed.data_parallel import shard_module_params
from xlstm_jax.distributed.dense import SplitKernel
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.shared.utils import soft_cap_logits


class LMHead(nn.Module):
    """Norm, projection to the vocabulary and soft cap; the vocabulary is split over the model axis.

    Attributes:
        vocab_size: The number of tokens.
        axis_name: The mesh axis.
        norm_fn: Creates the norm before the projection.
        kernel_init: Initialises the projection.
        logits_soft_cap: Squash logits into (-cap, cap); `None` leaves them as they are.
        dtype: Precision of the projection; logits are float32.
        param_dtype: Precision of the parameters.
        tokens_per_chunk: How many tokens the losses treat at once.
    """

    vocab_size: int
    axis_name: str
    norm_fn: Callable[..., nn.Module]
    kernel_init: Callable
    logits_soft_cap: float | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    tokens_per_chunk: int = 1024

    @nn.compact
    def __call__(
        self, x: jax.Array, targets: jax.Array | None = None, embedding: jax.Array | None = None
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Compute logits, or the losses of targets.

        Args:
            x: Hidden states, whole on each device of the axis.
            targets: The target of each position; logits are returned if there are none.
            embedding: The embedding `[vocab, features]` whose transpose is the projection, if weights are tied.

        Returns:
            The logits of the whole vocabulary; or for each position the cross-entropy of its target, and whether it has
            the largest logit.
        """
        x = self.norm_fn(name="out_norm")(x).astype(self.dtype)
        if embedding is None:
            project = SplitKernel(self.vocab_size, self.axis_name, self.kernel_init, self.param_dtype, name="out_dense")
            kernel = project(x.shape[-1])
        else:
            kernel = split_array_over_mesh(embedding, self.axis_name, split_axis=0).T
        kernel = kernel.astype(self.dtype)
        if targets is None:
            return gather_whole(self._logits(x, kernel), (None,) * (x.ndim - 1) + (self.axis_name,))
        return self._losses(x, kernel, targets)

    def _logits(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
        """Compute the logits of this device's part of the vocabulary."""
        logits = jnp.matmul(x, kernel, preferred_element_type=jnp.promote_types(self.dtype, jnp.float32))
        return soft_cap_logits(logits, self.logits_soft_cap)

    def _losses(self, x: jax.Array, kernel: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Compute losses a few tokens at a time; their logits are computed again in the backward pass."""
        num_tokens = targets.size
        chunk_size = min(self.tokens_per_chunk, num_tokens)
        padding = -num_tokens % chunk_size
        rows = jnp.pad(x.reshape(num_tokens, -1), ((0, padding), (0, 0)))
        chunks = (
            rows.reshape(-1, chunk_size, x.shape[-1]),
            jnp.pad(targets.reshape(-1), (0, padding)).reshape(-1, chunk_size),
        )

        @jax.checkpoint
        def of_chunk(chunk):
            return _cross_entropy(self._logits(chunk[0], kernel), chunk[1], self.axis_name)

        losses, hits = (y.reshape(-1)[:num_tokens].reshape(targets.shape) for y in lax.map(of_chunk, chunks))
        return losses, hits


def _cross_entropy(logits: jax.Array, targets: jax.Array, axis_name: str) -> tuple[jax.Array, jax.Array]:
    """Compute the cross-entropy of targets with logits whose vocabulary is split over a mesh axis."""
    is_split = axis_size(axis_name) > 1
    largest = lax.stop_gradient(jnp.max(logits, axis=-1))
    largest = lax.pmax(largest, axis_name) if is_split else largest
    index = targets - axis_index(axis_name) * logits.shape[-1]
    is_here = (index >= 0) & (index < logits.shape[-1])
    own = jnp.take_along_axis(logits, jnp.clip(index, 0, logits.shape[-1] - 1)[..., None], axis=-1)[..., 0]
    parts = jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1), jnp.where(is_here, own, 0.0)
    total, target_logit = lax.psum(parts, axis_name) if is_split else parts
    return jnp.log(total) + largest - target_logit, target_logit >= largest


class TPLMHead(nn.Module):
    """Language-model head in which each device of the model axis takes a part of the sequence.

    Attributes:
        parallel: Names the mesh axes.
        vocab_size: The number of tokens.
        kernel_init: Initialises the projection.
        norm_fn: Creates the norm before the projection; `None` for none.
        lm_head_dtype: Precision of the projection; logits are float32.
        logits_soft_cap: Squash logits into (-cap, cap); `None` leaves them as they are.
    """

    parallel: ParallelConfig
    vocab_size: int
    kernel_init: nn.initializers.Initializer
    norm_fn: Callable[..., nn.Module] | None
    lm_head_dtype: DTypeLike = jnp.float32
    logits_soft_cap: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of this device's part of the sequence, from its part of the features."""
        axis_name = self.parallel.model_axis_name
        x = gather_whole(x, (None,) * (x.ndim - 1) + (axis_name,))
        x = split_array_over_mesh(x, axis_name, split_axis=1)
        if self.norm_fn is not None:
            x = self.norm_fn(name="out_norm")(x)
        dense = shard_module_params(nn.Dense, axis_name, min_weight_size=self.parallel.fsdp_min_weight_size)
        logits = dense(
            self.vocab_size,
            use_bias=False,
            kernel_init=self.kernel_init,
            dtype=self.lm_head_dtype,
            name="out_dense",
        )(x)
        return soft_cap_logits(logits.astype(jnp.float32), self.logits_soft_cap)
