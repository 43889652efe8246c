"""The language-model head: logits of hidden states, and losses of targets without materialising all logits."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from jax.typing import DTypeLike

from xlstm_jax.distributed.array_utils import axis_index, axis_size, gather_whole, split_array_over_mesh
from xlstm_jax.distributed.data_parallel import shard_module_params
from xlstm_jax.distributed.dense import SplitKernel
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.kernels.cross_entropy import api as cross_entropy
from xlstm_jax.kernels.cross_entropy.plain import compute_logits
from xlstm_jax.kernels.cross_entropy.target_range import is_in_vocabulary, nan_where_invalid
from xlstm_jax.kernels.shared.remat_names import SMALL, keep
from xlstm_jax.models.shared.utils import soft_cap_logits


class LMHead(nn.Module):
    """Norm, projection to the vocabulary and soft cap; the vocabulary is sharded over the model axis.

    Attributes:
        vocab_size: The number of tokens.
        axis_name: The mesh axis.
        norm_fn: Creates the norm before the projection.
        kernel_init: Initialises the projection.
        logits_soft_cap: Squash logits into (-cap, cap); `None` for no cap.
        dtype: Precision of the projection; logits are float32.
        param_dtype: Precision of the parameters.
        tokens_per_chunk: The number of tokens whose losses are computed at once.
        keep_logits: Whether all logits are saved for the backward pass.
    """

    vocab_size: int
    axis_name: str
    norm_fn: Callable[..., nn.Module]
    kernel_init: Callable
    logits_soft_cap: float | None = None
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    tokens_per_chunk: int = 1024
    keep_logits: bool = False

    @nn.compact
    def __call__(
        self, x: jax.Array, targets: jax.Array | None = None, embedding: jax.Array | None = None
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Compute logits, or the losses of targets.

        Args:
            x: Hidden states, replicated over the model axis.
            targets: The target of each position; without targets, logits are returned.
            embedding: The embedding `[vocab, features]` whose transpose is the projection, if weights are tied.

        Returns:
            The logits of the whole vocabulary; or for each position the cross-entropy of its target, and whether the
            target has the largest logit, the first one if several are equal. The loss of a target outside the
            vocabulary is NaN, with gradients of 0 if the loss is masked.
        """
        x = self.norm_fn(name="out_norm")(x).astype(self.dtype)
        if embedding is None:
            project = SplitKernel(self.vocab_size, self.axis_name, self.kernel_init, self.param_dtype, name="out_dense")
            kernel = project(x.shape[-1])
        else:
            kernel = split_array_over_mesh(embedding, self.axis_name, split_axis=0).T
        if targets is None:
            logits = compute_logits(x, kernel, dtype=self.dtype, cap=self.logits_soft_cap)
            return gather_whole(logits, (None,) * (x.ndim - 1) + (self.axis_name,))
        options = _Options(jnp.dtype(self.dtype), self.logits_soft_cap, self.tokens_per_chunk)
        x = x.reshape(-1, x.shape[-1])
        results: Any = _losses(
            x, kernel, targets.reshape(-1).astype(jnp.int32), self.axis_name, options, self.keep_logits
        )
        losses, hits = (y.reshape(targets.shape) for y in results)
        return nan_where_invalid(losses, is_in_vocabulary(targets, self.vocab_size)), hits


class _Options(NamedTuple):
    """Options for computing logits."""

    dtype: jnp.dtype
    cap: float | None
    tokens_per_chunk: int


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _losses(
    x: jax.Array, kernel: jax.Array, targets: jax.Array, axis_name: str, options: _Options, keep_logits: bool
) -> tuple[jax.Array, jax.Array]:
    """Compute for each token the cross-entropy of its target, and whether the target has the largest logit."""
    del keep_logits  # only used in the backward pass
    results, _ = _losses_forward(x, kernel, targets, axis_name, options, keep_logits=False)
    return results


def _losses_forward(x, kernel, targets, axis_name, options, keep_logits):
    first = axis_index(axis_name) * kernel.shape[-1]
    own_targets = targets - first
    (largest, totals, target_logits, best), kept = cross_entropy.vocabulary_sums(
        x, kernel, own_targets, **options._asdict(), keep_logits=keep_logits
    )
    best = best + first
    if axis_size(axis_name) > 1:
        own_largest, largest = largest, lax.pmax(largest, axis_name)
        totals, target_logits = lax.psum((totals * jnp.exp(own_largest - largest), target_logits), axis_name)
        best = lax.pmin(jnp.where(own_largest == largest, best, jnp.iinfo(jnp.int32).max), axis_name)
    log_totals = keep(jnp.log(totals) + largest, SMALL)
    return (log_totals - target_logits, best == targets), (x, kernel, own_targets, log_totals, kept)


def _losses_backward(axis_name, options, keep_logits, residuals, cotangents):
    del keep_logits
    dlosses = cotangents[0]
    if axis_size(axis_name) > 1:  # every device has computed all losses
        dlosses = lax.psum(dlosses, axis_name)
    x, kernel, own_targets, log_totals, kept = residuals
    dx, dkernel = cross_entropy.gradients(x, kernel, own_targets, log_totals, dlosses, kept, **options._asdict())
    return dx, dkernel, None


_losses.defvjp(_losses_forward, _losses_backward)


class TPLMHead(nn.Module):
    """Language-model head whose sequence is sharded over the model axis.

    Attributes:
        parallel: Names the mesh axes.
        vocab_size: The number of tokens.
        kernel_init: Initialises the projection.
        norm_fn: Creates the norm before the projection; `None` for none.
        lm_head_dtype: Precision of the projection; logits are float32.
        logits_soft_cap: Squash logits into (-cap, cap); `None` for no cap.
    """

    parallel: ParallelConfig
    vocab_size: int
    kernel_init: nn.initializers.Initializer
    norm_fn: Callable[..., nn.Module] | None
    lm_head_dtype: DTypeLike = jnp.float32
    logits_soft_cap: float | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of this device's shard of the sequence, from its shard of the features."""
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
