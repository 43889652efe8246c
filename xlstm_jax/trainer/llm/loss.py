"""The loss of a language model: the mean over all targets of the global batch, on any mesh and with any padding."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from xlstm_jax.common_types import PyTree, StepMetrics
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.distributed.array_utils import (
    axis_index,
    axis_size,
    fold_rng_over_axis,
    gather_whole,
    split_array_over_mesh,
)
from xlstm_jax.kernels.cross_entropy.target_range import is_in_vocabulary, nan_where_invalid
from xlstm_jax.trainer.base.steps import INTERMEDIATES
from xlstm_jax.trainer.user_functions import StepContext, model_takes

LOSS = re.compile(r"(|.*_)loss(|_mean|_single)$")


def count_targets(batch: LLMBatch) -> jax.Array:
    """Count the targets that are not padding."""
    return jnp.sum(batch.targets_segmentation != 0)


def next_token_loss(
    params: PyTree,
    apply_fn: Callable,
    batch: LLMBatch,
    rng: jax.Array,
    context: StepContext,
    *,
    axis_names: Sequence[str],
    log_logit_stats: bool = False,
) -> tuple[jax.Array, tuple[StepMetrics, PyTree]]:
    """Compute the cross-entropy of the targets, inside `jax.shard_map`.

    Args:
        params: The parameters.
        apply_fn: The `apply` method of the model. A model that takes `targets` returns losses and hits, and never
            materialises all logits; others return the logits of the full sequence or, like `TPLMHead`, of this device's
            shard of it.
        batch: This device's rows, replicated over the pipeline and model axes.
        rng: The key for dropout, which differs between devices with different rows.
        context: The context of the step. Without `num_targets`, the loss is the mean over this device's targets.
        axis_names: The mesh axes.
        log_logit_stats: Whether to report norms, standard deviations and maxima of the logits, which materialises all
            logits.

    Returns:
        The loss; metrics, in which each target of the global batch counts once; and the new mutable variables.
    """
    mutable_variables = context.mutable_variables or {}
    rng = fold_rng_over_axis(rng, tuple(axis_names[:2]))
    give_targets = model_takes(apply_fn, "targets") and not log_logit_stats
    result, variables = apply_fn(
        {"params": params, **mutable_variables},
        batch.inputs,
        pos_idx=batch.inputs_position,
        document_borders=batch.get_document_borders(),
        train=context.train,
        rngs={"dropout": rng},
        mutable=[INTERMEDIATES, *mutable_variables],
        **({"targets": batch.targets} if give_targets else {}),
    )
    losses, hits = result if give_targets else losses_and_hits(result, batch.targets, axis_names[-1])
    is_target = batch.targets_segmentation != 0
    total, num_hits = (jnp.sum(jnp.where(is_target, x, 0)) for x in (losses, hits))
    num_targets = jnp.sum(is_target)
    loss = total / jnp.maximum(num_targets, 1)
    num_parts = context.num_parts or axis_size(tuple(axis_names))
    if context.num_targets is not None:
        loss = total * num_parts / jnp.maximum(context.num_targets, 1)

    once = _counts_once(axis_names)
    metrics: StepMetrics = {
        "loss": {"value": once * total, "count": once * num_targets},
        "accuracy": {"value": once * num_hits, "count": once * num_targets},
    }
    if context.train:
        metrics |= _batch_metrics(batch, once * num_targets, once, num_parts)
    if log_logit_stats:
        metrics |= _logit_metrics(result)
    return loss, (metrics, variables)


def add_perplexities(metrics: dict[str, Any], bytes_per_token: float | None = None) -> dict[str, Any]:
    """Add the perplexity of each loss: `dclm_perplexity` for `dclm_loss`, `perplexity_mean` for `loss_mean`.

    Args:
        metrics: The metrics on the host.
        bytes_per_token: The mean number of bytes in a token; if given, `bits_per_byte` of each loss is added too.

    Returns:
        The metrics, including the added ones.
    """
    added = {}
    for name, loss in metrics.items():
        if found := LOSS.match(name):
            added[f"{found[1]}perplexity{found[2]}"] = _perplexity(loss)
            if bytes_per_token is not None:
                added[f"{found[1]}bits_per_byte{found[2]}"] = loss / math.log(2) / bytes_per_token
    return metrics | added


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def losses_and_hits(logits: jax.Array, targets: jax.Array, model_axis: str) -> tuple[jax.Array, jax.Array]:
    """Return the loss of each target, NaN if it is outside the vocabulary, and whether it has the largest logit.

    Args:
        logits: The logits `[batch, length, vocab]`, of the full sequence or of this device's shard, as of `TPLMHead`.
        targets: The targets `[batch, length]` of the full sequence.
        model_axis: The mesh axis over which the sequence may be sharded.

    Returns:
        Losses and hits of all targets.
    """
    size = axis_size(model_axis)
    num_rows, length = targets.shape
    is_part = size > 1 and logits.shape[:-1] == (num_rows, length // size) and length % size == 0
    if logits.ndim != 3 or not (is_part or logits.shape[:-1] == targets.shape):
        raise ValueError(
            f"The model returned logits of shape {logits.shape} for targets of shape {targets.shape}: they have to be "
            f"[batch, length, vocab], with the whole length or a device's part of it over {model_axis!r} ({size} "
            "devices), and the whole vocabulary."
        )
    own = split_array_over_mesh(targets, model_axis, 1) if is_part else targets
    own = own.astype(jnp.int32)
    is_valid = is_in_vocabulary(own, logits.shape[-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), jnp.where(is_valid, own, 0))
    losses = nan_where_invalid(losses, is_valid)
    hits = jnp.argmax(logits, axis=-1) == own
    return (
        (gather_whole(losses, (None, model_axis)), gather_whole(hits, (None, model_axis)))
        if is_part
        else (losses, hits)
    )


def _counts_once(axis_names: Sequence[str]) -> jax.Array:
    """Return 1 on one of the devices that have the same rows, and 0 on the others."""
    return jnp.asarray(axis_index(tuple(axis_names[2:])) == 0, jnp.int32)


def _batch_metrics(batch: LLMBatch, num_targets: jax.Array, once: jax.Array, num_parts: int) -> dict[str, Any]:
    num_documents = once * jnp.sum(jnp.max(batch.inputs_segmentation, axis=1))
    share = {"count": 1 / num_parts, "log_modes": ["mean"]}
    return {
        "token_utilization": {"value": num_targets, "count": once * batch.targets.size, "log_modes": ["mean"]},
        "tokens_per_batch": {"value": num_targets, **share},
        "num_docs_per_batch": {"value": num_documents, **share},
    }


def _logit_metrics(logits: jax.Array) -> dict[str, Any]:
    norms = jnp.linalg.norm(logits, axis=-1)
    return {
        "logits_norm": {"value": jnp.mean(norms), "count": 1, "log_modes": ["mean"]},
        "logits_std": {"value": jnp.std(logits), "count": 1, "log_modes": ["mean"]},
        "logits_max": {"value": jnp.max(logits), "count": 1, "log_modes": ["max"]},
    }
