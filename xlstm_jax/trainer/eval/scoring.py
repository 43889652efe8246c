"""Log-likelihoods of rows, read in one pass or chunk by chunk."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import ImmutableMetrics, PyTree
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.callbacks.extended_evaluation import EvalState, device_metrics_aggregation
from xlstm_jax.trainer.llm.loss import losses_and_hits
from xlstm_jax.trainer.llm.trainer import LLMTrainer
from xlstm_jax.trainer.metrics import update_metrics
from xlstm_jax.trainer.placement import compile_step, on_mesh
from xlstm_jax.trainer.user_functions import gather_rows, init_model_state, model_takes

KEEPS_VALUES = "single_noreduce"
KEEPS_SUMS = "single_noreduce_wcount"


def score_rows(
    apply_fn: Callable, variables: Mapping[str, Any], batch: Any, model_axis: str, cache: PyTree | None = None
) -> tuple[Mapping[str, Any], PyTree]:
    """Compute the log-likelihood of each row, and the number of its targets that are the most likely tokens.

    Args:
        apply_fn: The `apply` method of the model. One that takes `targets` never materialises all logits.
        variables: Its variables.
        batch: An `LLMIndexedBatch`.
        model_axis: The mesh axis whose devices share the model.
        cache: The state before the first column; the model's own by default.

    Returns:
        The metrics with one entry per row: the sums with the number of targets, and the indices of the row. Then the
        state after the last column, if `cache` was given.
    """
    options = {} if cache is None else {"state": cache, "return_state": True}
    gives_losses = model_takes(apply_fn, "targets")
    if gives_losses:
        options["targets"] = batch.targets
    result = apply_fn(
        variables,
        batch.inputs,
        pos_idx=batch.inputs_position,
        document_borders=batch.get_document_borders(),
        train=False,
        **options,
    )
    result, after = (result, None) if cache is None else result
    losses, hits = result if gives_losses else losses_and_hits(result, batch.targets, model_axis)
    is_target = batch.targets_segmentation != 0
    sums = {"count": jnp.sum(is_target, axis=1), "log_modes": [KEEPS_SUMS]}
    metrics = {
        "loglikelihood": {"value": -jnp.sum(jnp.where(is_target, losses, 0), axis=1), **sums},
        "accuracies": {"value": jnp.sum(is_target & hits, axis=1), **sums},
        "document_idx": {"value": batch.document_idx, "log_modes": [KEEPS_VALUES]},
        "sequence_idx": {"value": batch.sequence_idx, "log_modes": [KEEPS_VALUES]},
    }
    return metrics, after


class ChunkReader:
    """Reads batches chunk by chunk, passing the state on; one program serves all lengths.

    Args:
        trainer: The trainer.
        chunk_size: The number of tokens of a chunk.
        num_rows: The number of rows of a batch.
    """

    def __init__(self, trainer: LLMTrainer, chunk_size: int, num_rows: int):
        self._trainer = trainer
        self._chunk_size = chunk_size
        num_parts = trainer.mesh.shape[trainer.data_axis_name] * trainer.mesh.shape[trainer.fsdp_axis_name]
        self._rows_per_device = num_rows // num_parts
        states = EvalState.from_train_state(train_state=trainer.state_partition_specs.replace(opt_state=()))
        rows, per_device = trainer.batch_partition_specs, P(trainer.axis_names)
        init = on_mesh(self._init_on_device, trainer.mesh, (states,), per_device)
        read = on_mesh(self._read_on_device, trainer.mesh, (states, rows, per_device), (P(), per_device))
        debug = trainer.trainer_config.debug
        self.init_cache = compile_step(init, donate=(), debug=debug)
        self._read = compile_step(read, donate=(2,), debug=debug)
        self._cut = compile_step(self._cut_chunk, donate=(), debug=debug)
        self._add = compile_step(_add_sums, donate=(), debug=debug)

    def read(self, state: EvalState, batch: Any, cache: PyTree) -> tuple[Any, PyTree]:
        """Return the metrics of the rows, `None` if there are no columns, and the state after them.

        Args:
            state: The parameters.
            batch: The rows; the last chunk is padded.
            cache: The state before the first chunk, from `init_cache`; it is donated.
        """
        metrics = None
        for index in range(math.ceil(batch.inputs.shape[1] / self._chunk_size)):
            new, cache = self._read(state, self._cut(batch, index), cache)
            metrics = new if metrics is None else self._add(metrics, new)
        return metrics, cache

    def _init_on_device(self, state: EvalState) -> PyTree:
        cache = init_model_state(state.apply_fn, _variables(state), self._rows_per_device)
        return jax.tree.map(lambda x: x[None], cache)

    def _read_on_device(self, state: EvalState, chunk: Batch, cache: PyTree) -> tuple[ImmutableMetrics, PyTree]:
        rows = gather_rows(chunk, self._trainer.axis_names)
        before, model_axis = jax.tree.map(lambda x: x[0], cache), self._trainer.model_axis_name
        metrics, after = score_rows(state.apply_fn, _variables(state), rows, model_axis, cache=before)
        metrics = update_metrics(None, device_metrics_aggregation(self._trainer, metrics))
        return metrics, jax.tree.map(lambda x: x[None], after)

    def _cut_chunk(self, batch: Any, index: Any) -> Any:
        """Return a chunk with the document borders of the whole batch."""

        def cut(x: jax.Array) -> jax.Array:
            padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % self._chunk_size)))
            return lax.dynamic_slice_in_dim(padded, index * self._chunk_size, self._chunk_size, axis=1)

        whole = dataclasses.replace(batch, _document_borders=batch.get_document_borders())
        return jax.tree.map(lambda x: cut(x) if x.ndim > 1 else x, whole)


def _add_sums(metrics: ImmutableMetrics, new: ImmutableMetrics) -> ImmutableMetrics:
    """Add the metrics of a chunk to those of earlier chunks: sums are added, indices are replaced."""
    return FrozenDict(
        {
            name: jax.tree.map(jnp.add, metrics[name], new[name]) if KEEPS_SUMS in new[name] else new[name]
            for name in new
        }
    )


def _variables(state: EvalState) -> dict[str, Any]:
    return {"params": state.params, **(state.mutable_variables or {})}
