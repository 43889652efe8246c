"""The trainer of language models: its loss, generation, and evaluation chunk by chunk."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from xlstm_jax.common_types import HostMetrics, ImmutableMetrics, Metrics, PyTree, StepMetrics, TrainState
from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import Batch, LLMBatch, to_host
from xlstm_jax.inference.generate import as_rows
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.steps import eval_step
from xlstm_jax.trainer.base.trainer import TrainerModule
from xlstm_jax.trainer.llm.loss import add_perplexities, count_targets, next_token_loss
from xlstm_jax.trainer.llm.sampling import generate_tokens, temperature_sampling
from xlstm_jax.trainer.placement import on_mesh, zeros_on_mesh
from xlstm_jax.trainer.user_functions import StepContext, current_context, documented_loss, init_model_state

EXAMPLE_LENGTH = 64
GenerateFn = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(kw_only=True, frozen=False)
class LLMTrainerConfig(TrainerConfig):
    """Config of the training of a language model."""

    log_logit_stats: bool = False
    """Report norms, standard deviations and maxima of logits, which materialises all logits of a minibatch."""
    bytes_per_token: float | None = None
    """The mean bytes of text in a token, 1 for byte-level models. If set, losses are reported in bits per byte too."""

    def __post_init__(self):
        super().__post_init__()
        if self.bytes_per_token is not None and self.bytes_per_token <= 0:
            raise ConfigError(f"bytes_per_token is {self.bytes_per_token}, but has to be positive.")


class LLMTrainer(TrainerModule):
    """Trains a language model on `LLMBatch`es. The loss is the mean over all targets of the batch without padding."""

    config_class = LLMTrainerConfig
    trainer_config: LLMTrainerConfig

    def count_targets(self, batch: Batch) -> jax.Array | None:
        """Count the targets that are not padding."""
        return count_targets(_as_llm_batch(batch))

    def loss_function(
        self,
        params: Any,
        apply_fn: Any,
        batch: Batch,
        rng: jax.Array,
        train: bool = True,
        mutable_variables: Mapping[str, Any] | None = None,
    ) -> tuple[jax.Array, tuple[StepMetrics, PyTree]]:
        """Return the cross-entropy of the targets, with metrics and mutable variables; see `next_token_loss`."""
        context = current_context() or StepContext()
        return next_token_loss(
            params,
            apply_fn,
            _as_llm_batch(batch),
            rng,
            context._replace(train=train, mutable_variables=mutable_variables),
            axis_names=self.axis_names,
            log_logit_stats=self.trainer_config.log_logit_stats,
        )

    def get_metric_postprocess_fn(self) -> Callable[[HostMetrics], HostMetrics]:
        """Return a function that adds perplexities, and bits per byte if `bytes_per_token` is set."""
        return functools.partial(add_perplexities, bytes_per_token=self.trainer_config.bytes_per_token)

    @classmethod
    def example_batch(cls, num_rows: int) -> Batch:
        """Return the shapes of a batch with a default length."""
        return LLMBatch.get_dtype_struct(num_rows, EXAMPLE_LENGTH)

    def get_generate_fn(
        self,
        max_length: int = 2048,
        eod_token_id: int = -1,
        token_sample_fn: Callable[[jax.Array, jax.Array], jax.Array] = temperature_sampling,
        gather_params_once: bool = False,
        param_dtype: DTypeLike | None = None,
    ) -> GenerateFn:
        """Return a function that continues sequences.

        Args:
            max_length: The length of a sequence, prefix included.
            eod_token_id: The end-of-document token; -1 for none.
            token_sample_fn: Chooses tokens from logits and a key.
            gather_params_once: Whether to gather parameters once instead of per token, which is faster if they fit.
            param_dtype: The dtype of the parameters; their own by default.

        Returns:
            A function `(state, rng, prefix_tokens, prefix_mask=None, cache=None) -> (tokens, is_valid)`. Prefixes are
            `[rows, length]`, or `[rows]` for one token each; tokens `[rows, max_length]`, zeros where they are not
            valid.
        """
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}, but must be at least 1.")
        data_axes = (self.data_axis_name, self.fsdp_axis_name)
        rows, per_device = P(data_axes), P(self.axis_names)
        num_parts = math.prod(self.mesh.shape[axis] for axis in data_axes)

        def generate(state: TrainState, rng: jax.Array, prefix: jax.Array, mask: Any, cache: Any) -> Any:
            return generate_tokens(
                state,
                rng,
                prefix,
                mask,
                cache=_first(cache),
                max_length=max_length,
                eod_token_id=eod_token_id,
                token_sample_fn=token_sample_fn,
                gather_params_once=gather_params_once,
                data_axis_name=self.data_axis_name,
                fsdp_axis_name=self.fsdp_axis_name,
                param_dtype=param_dtype,
            )

        specs = (self.state_partition_specs, P(), rows, rows, per_device)
        compiled = jax.jit(on_mesh(generate, self.mesh, specs, rows))

        def run(
            state: TrainState,
            rng: jax.Array,
            prefix_tokens: jax.Array | np.ndarray,
            prefix_mask: jax.Array | np.ndarray | None = None,
            cache: PyTree | None = None,
        ) -> tuple[jax.Array, jax.Array]:
            given = prefix_tokens, prefix_mask
            prefix_tokens, prefix_mask = as_rows(prefix_tokens, prefix_mask)
            if not any(isinstance(x, Tracer) for x in given):
                self.token_check.check_ids("The prefixes", _given_tokens(*given))
            num_rows = prefix_tokens.shape[0]
            pad = functools.partial(_pad_rows, multiple=num_parts)
            mask = None if prefix_mask is None else pad(prefix_mask)
            tokens, is_valid = compiled(state, rng, pad(prefix_tokens), mask, cache)
            return tokens[:num_rows], is_valid[:num_rows]

        return run

    def get_cache_shape_dtype_struct(self, exmp_batch: LLMBatch | None = None) -> PyTree:
        """Return the shapes of the recurrent state of a batch, with one entry per device along the first axis."""
        batch = self.exmp_batch if exmp_batch is None else exmp_batch
        return jax.eval_shape(self._init_cache(), self.state, batch.inputs)

    def create_recurrent_evaluation_step_function(
        self,
        chunk_size: int,
        exmp_batch: LLMBatch | None = None,
        cache_init_fn: Callable[[PyTree], PyTree] | None = None,
    ) -> Callable[[TrainState, LLMBatch, Metrics | None], ImmutableMetrics]:
        """Return an evaluation step that reads a batch chunk by chunk, with the memory of one chunk.

        Args:
            chunk_size: The number of tokens of a chunk.
            exmp_batch: An example of a batch; that of the trainer by default.
            cache_init_fn: Creates the state before the first chunk from its shapes; the model's own by default.

        Returns:
            A function `(state, batch, metrics) -> metrics`. Document borders are those of the whole batch.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}: it has to be 1 or more.")
        per_device = P(self.axis_names)
        batch_specs, state_specs = self.batch_partition_specs, self.state_partition_specs
        step = functools.partial(self._evaluate_chunk, chunk_size=chunk_size)
        compiled = jax.jit(
            on_mesh(step, self.mesh, (state_specs, batch_specs, P(), per_device, P()), (P(), per_device)),
            donate_argnums=(2, 3),
        )
        init_cache = jax.jit(self._init_cache())

        def first_metrics(state: TrainState, batch: LLMBatch) -> ImmutableMetrics:
            batch = _pad_columns(batch, chunk_size)
            return compiled(state, batch, None, init_cache(state, batch.inputs), 0)[0]

        example = self.exmp_batch if exmp_batch is None else exmp_batch
        metrics_shapes = jax.eval_shape(first_metrics, self.state, example)

        def evaluate(state: TrainState, batch: LLMBatch, metrics: Metrics | None) -> Any:
            batch = _pad_columns(batch, chunk_size)
            if cache_init_fn is None:
                cache = init_cache(state, batch.inputs)
            else:
                cache = cache_init_fn(jax.eval_shape(init_cache, state, batch.inputs))
            metrics = zeros_on_mesh(metrics_shapes, self.mesh) if metrics is None else metrics
            for index in range(batch.inputs.shape[1] // chunk_size):
                metrics, cache = compiled(state, batch, metrics, cache, index)
            return metrics

        return evaluate

    def _init_cache(self) -> Callable[[TrainState, jax.Array], PyTree]:
        """Return a program that creates the state before the first token, with a first axis over devices."""

        def init(state: TrainState, inputs: jax.Array) -> PyTree:
            num_rows = (
                inputs.shape[0] * self.mesh.shape[self.pipeline_axis_name] * self.mesh.shape[self.model_axis_name]
            )
            variables = {"params": state.params, **(state.mutable_variables or {})}
            cache = init_model_state(state.apply_fn, variables, num_rows)
            return jax.tree.map(lambda x: x[None], cache)

        specs = (self.state_partition_specs, self.batch_partition_specs)
        return on_mesh(init, self.mesh, specs, P(self.axis_names))

    def _evaluate_chunk(
        self, state: TrainState, batch: LLMBatch, metrics: Any, cache: PyTree, index: jax.Array, *, chunk_size: int
    ) -> tuple[ImmutableMetrics, PyTree]:
        start = index * chunk_size
        chunk = _map_columns(lambda x: lax.dynamic_slice_in_dim(x, start, chunk_size, axis=1), batch)
        after = None

        def apply_fn(*args: Any, **kwargs: Any) -> Any:
            nonlocal after
            result = state.apply_fn(*args, state=_first(cache), return_state=True, **kwargs)
            (outputs, after), *variables = result if "mutable" in kwargs else (result,)
            return (outputs, *variables) if variables else outputs

        vars(apply_fn)["__self__"] = getattr(state.apply_fn, "__self__", None)  # For `model_takes`.
        metrics = eval_step(
            state.replace(apply_fn=apply_fn),
            chunk,
            metrics,
            axis_names=self.axis_names,
            loss_function=documented_loss(self.loss_function),
            count_targets=self.count_targets,
            seed=self.trainer_config.seed_eval,
        )
        return metrics, jax.tree.map(lambda x: x[None], after)


def _as_llm_batch(batch: Batch) -> LLMBatch:
    if not isinstance(batch, LLMBatch):
        raise TypeError(f"A language model is trained on batches of LLMBatch, but this is a {type(batch).__name__}.")
    return batch


def _first(cache: PyTree) -> PyTree:
    """Drop the axis over devices."""
    return None if cache is None else jax.tree.map(lambda x: x[0], cache)


def _given_tokens(prefix_tokens: Any, prefix_mask: Any) -> np.ndarray:
    """Return which tokens of prefixes are given; the first one of each prefix always is."""
    tokens = to_host(prefix_tokens)
    if prefix_mask is None or tokens.ndim == 1:
        return tokens
    is_given = to_host(prefix_mask).astype(bool)
    is_given[:, 0] = True
    return tokens[is_given]


def _pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    """Pad a batch with copies of its last row, until the number of rows is divisible."""
    return jnp.pad(x, ((0, -x.shape[0] % multiple), (0, 0)), mode="edge")


def _pad_columns(batch: LLMBatch, multiple: int) -> LLMBatch:
    """Pad the columns to a multiple of the chunk size, and keep the document borders of the unpadded batch."""
    batch = dataclasses.replace(batch, _document_borders=batch.get_document_borders())
    return _map_columns(lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple))), batch)


def _map_columns(function: Callable[[jax.Array], jax.Array], batch: LLMBatch) -> LLMBatch:
    """Apply a function to the arrays with one entry per token, and leave those with one entry per row unchanged."""
    return jax.tree.map(lambda x: function(x) if x.ndim > 1 else x, batch)
