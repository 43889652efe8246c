"""Tasks of the evaluation harness lm-eval, run on the model of a training run.

lm-eval turns tasks into requests, and answers into metrics; this module answers the requests. All processes get all
requests, answer them together, and have the same answers.
"""

import dataclasses
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.experimental import multihost_utils

from xlstm_jax.common_types import HostMetrics, ImmutableMetrics, Metrics, PyTree, TrainState
from xlstm_jax.configs import ConfigError, refuse_ignored
from xlstm_jax.dataset.batch import Batch, LLMIndexedBatch
from xlstm_jax.dataset.grain_iterator import make_grain_llm_iterator
from xlstm_jax.dataset.grain_transforms import InferSegmentations
from xlstm_jax.dataset.lmeval_dataset import HFTokenizeLogLikelihoodRolling, document_tokens
from xlstm_jax.dataset.lmeval_pipeline import lmeval_preprocessing_pipeline
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary, check_vocabularies
from xlstm_jax.inference.sampling import temperature_sampling
from xlstm_jax.trainer.callbacks.extended_evaluation import EvalState, ExtendedEvaluation, ExtendedEvaluationConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.eval.harness import create_lm, harness, numbers, preserve_random_states
from xlstm_jax.trainer.eval.prompts import Prompt, batch_prompts
from xlstm_jax.trainer.eval.scoring import KEEPS_SUMS, KEEPS_VALUES, ChunkReader, score_rows
from xlstm_jax.trainer.llm.trainer import GenerateFn, LLMTrainer
from xlstm_jax.trainer.placement import place_batch
from xlstm_jax.trainer.run.trainer_like import TrainerLike

LOGGER = logging.getLogger(__name__)

DEBUG_SCALE = 1e-4
SAMPLING_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature"}


@dataclasses.dataclass(kw_only=True, frozen=False)
class LMEvalEvaluationConfig(ExtendedEvaluationConfig):
    """Config of an lm-eval evaluation."""

    tokenizer_path: str
    """The tokenizer of the model, as for `load_tokenizer`."""
    evaluation_tasks: list[str]
    """Names of tasks or groups of lm-eval, or paths of YAML files with tasks."""
    include_path: str | Path | None = None
    """A folder of YAML files with further tasks."""
    include_defaults: bool = True
    """Whether the tasks of lm-eval itself are available; indexing them takes a few seconds once."""
    log_mode: str = "{task}"
    """The mode that the results of each task are logged in."""
    cache_requests: bool = True
    """Let lm-eval cache the requests of tasks on disk, by the name of a task and not by its content."""
    limit_requests: int | None = None
    """Evaluate only the first documents of each task."""
    write_out: bool = False
    """Let lm-eval log the prompt of the first document of each task."""
    use_infinite_eval: bool = True
    """Read documents of any length chunk by chunk. Otherwise they are split into windows of `context_length`."""
    infinite_eval_chunksize: int = 64
    """The tokens of a chunk."""
    context_length: int | None = None
    """The tokens of a window; by default, as many as the trainer's example batch has."""
    batch_size: int | None = None
    """The rows of a batch on all devices; by default, as many as the trainer's example batch has."""
    worker_buffer_size: int = 1
    """The batches that each worker prepares ahead."""
    worker_count: int = 0
    """The processes that prepare batches; with 0, the main one does."""
    debug: bool = False
    """Scale log-likelihoods by 1e-4, so that the perplexities of untrained models stay finite."""
    system_instruction: str | None = None
    """The beginning of each prompt."""
    num_fewshot: int | None = None
    """The examples in each prompt; by default, as many as the task says."""
    bootstrap_iters: int = 1000
    """The samples from which lm-eval estimates standard errors; 0 for no such errors."""
    apply_chat_template: bool | str = False
    """Format prompts with the chat template of the tokenizer, or with the template of this name."""

    def __post_init__(self):
        super().__post_init__()
        if not self.evaluation_tasks:
            raise ConfigError("evaluation_tasks is empty: name at least one task.")
        if "{task}" not in self.log_mode:
            raise ConfigError(f"log_mode is {self.log_mode!r}, but needs '{{task}}' in it to keep tasks apart.")
        for name in ("infinite_eval_chunksize", "context_length", "batch_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ConfigError(f"{name} is {size}: it has to be 1 or more.")
        refuse_ignored(self, {"every_n_steps": "on evaluations, which run before validations and tests"})

    def ignored_fields(self) -> dict[str, str]:
        """Return the fields that have no effect with the others, each with the reason."""
        return {"context_length": "with use_infinite_eval"} if self.use_infinite_eval else {}

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "LMEvalEvaluation":
        """Build the callback."""
        if not isinstance(trainer, LLMTrainer):
            raise ConfigError(f"LMEvalEvaluation needs an LLMTrainer, not a {type(trainer).__name__}.")
        return LMEvalEvaluation(self, trainer, data_module)


class LMEvalEvaluation(ExtendedEvaluation):
    """Runs tasks of lm-eval before validations and tests, and logs the results of each task under its name.

    A request is a row of a batch, and the metrics of rows become answers. If documents are read chunk by chunk, one
    compiled program for a chunk serves all lengths.

    Args:
        config: What to evaluate.
        trainer: The trainer.
        data_module: The data of the run, which is not needed.

    Attributes:
        tokenizer: The tokenizer.
        lm: The model, as lm-eval sees it.
    """

    config: LMEvalEvaluationConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    trainer: LLMTrainer

    def __init__(
        self, config: LMEvalEvaluationConfig, trainer: LLMTrainer, data_module: DataloaderModule | None = None
    ):
        super().__init__(config, trainer, data_module)
        encoder = TextEncoder(config.tokenizer_path)
        self.vocabulary = Vocabulary.of_tokenizer(encoder)
        check_vocabularies(trainer.token_check.num_ids, {type(config).__name__: self.vocabulary})
        self.tokenizer = encoder.tokenizer
        self.bos_token_id, self.eos_token_id = document_tokens(self.tokenizer)
        if config.apply_chat_template and not hasattr(self.tokenizer, "apply_chat_template"):
            raise ValueError(
                f"The tokenizer {config.tokenizer_path!r} has no chat templates: set apply_chat_template=False."
            )
        self.lm = create_lm(self, f"{config.tokenizer_path}-{config.apply_chat_template}")
        self._generate_fn = functools.cache(self._create_generate_fn)

    # Hooks.

    def on_filtered_validation_epoch_start(self, epoch_idx: int, step_idx: int) -> None:
        """Evaluate the tasks."""
        self._log_results(step_idx)

    def on_test_epoch_start(self, epoch_idx: int) -> None:
        """Evaluate the tasks."""
        if self._active_on_epochs:
            self._log_results(self.trainer.global_step)

    def run_evaluate(self) -> dict[str, HostMetrics]:
        """Evaluate all tasks.

        Returns:
            The metrics of each task and each group of tasks, named as lm-eval names them, such as `acc,none`.
        """
        config = self.config
        os.environ.setdefault("DISABLE_MULTIPROC", "1")  # Or lm-eval forks, and threads of JAX may deadlock.
        with preserve_random_states():
            results = harness("evaluator").simple_evaluate(
                model=self.lm,
                tasks=list(config.evaluation_tasks),
                task_manager=self._task_manager,
                num_fewshot=config.num_fewshot,
                limit=config.limit_requests,
                cache_requests=config.cache_requests,
                bootstrap_iters=config.bootstrap_iters,
                write_out=config.write_out,
                log_samples=False,
                system_instruction=config.system_instruction,
                apply_chat_template=config.apply_chat_template,
            )
        # Where the environment has a LOCAL_RANK, lm-eval gives results to the first process of a machine only.
        results = {} if results is None else results["results"]
        to_metrics = self.get_metric_postprocess_fn()
        return {task: to_metrics(result) for task, result in results.items()}

    @staticmethod
    def get_metric_postprocess_fn() -> Callable[[Mapping[str, Any]], HostMetrics]:
        """Return a function that extracts the numbers of a result of lm-eval; those that do not apply become NaN."""
        return numbers

    def _log_results(self, step_idx: int) -> None:
        results = self.run_evaluate()
        log_info(f"LMEval results: {results}")
        for task, metrics in results.items():
            self.trainer.logger.log_host_metrics(metrics, step_idx, mode=self.config.log_mode.format(task=task))

    @functools.cached_property
    def _task_manager(self) -> Any:
        return harness("tasks").TaskManager(
            include_path=self.config.include_path, include_defaults=self.config.include_defaults
        )

    # Answers to requests of lm-eval, each an `Instance`.

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, and whether it is the most likely one."""
        answers = fuse_document_results(self.eval_model(self._load(requests), mode="lm-eval"))
        num_bad = sum(math.isnan(loglikelihood) for loglikelihood, _ in answers)
        if num_bad:
            LOGGER.warning(
                "%d of %d log-likelihoods are NaN: the model has diverged, or requests are longer than its state can "
                "hold, and use_infinite_eval=False would split them.",
                num_bad,
                len(answers),
            )
        scale = DEBUG_SCALE if self.config.debug else 1.0
        return [(scale * loglikelihood, is_greedy) for loglikelihood, is_greedy in answers]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each document."""
        return [loglikelihood for loglikelihood, _ in self.loglikelihood(requests)]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return a continuation of each context, up to where its options `until` or `max_gen_toks` say."""
        prompts = [self._read_prompt(number, request) for number, request in enumerate(requests)]
        ignored = set().union(*(prompt.ignored for prompt in prompts))
        if ignored:
            LOGGER.warning("Sampling knows a temperature only, and leaves out %s.", ", ".join(sorted(ignored)))
        key = jax.random.PRNGKey(self.trainer.trainer_config.seed_eval)
        cut, texts = harness("models.utils").postprocess_generated_text, {}
        for batch in batch_prompts(prompts, self.exmp_batch.inputs.shape[0]):
            generated = self._generate(batch, jax.random.fold_in(key, len(texts)))
            for prompt, tokens in zip(batch, generated, strict=False):
                texts[prompt.number] = cut(self.tokenizer.decode(tokens), prompt.until, None)
        return [texts[number] for number in range(len(requests))]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation with the chat template of the tokenizer."""
        name = self.config.apply_chat_template
        return self.tokenizer.apply_chat_template(
            chat_history,
            chat_template=name if isinstance(name, str) else None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    # Requests as rows of batches, and their metrics.

    def create_modified_exemplary_batch(self, exmp_batch: Batch) -> LLMIndexedBatch:
        """Return the shapes of a batch of requests."""
        rows, columns = exmp_batch.inputs.shape
        return LLMIndexedBatch.get_dtype_struct(self.config.batch_size or rows, self.config.context_length or columns)

    def _load(self, requests: Sequence[Any]) -> MultiHostDataLoadIterator:
        config = self.config
        rows, columns = self.exmp_batch.inputs.shape
        options: dict[str, Any] = {
            "dataloading_host_index": jax.process_index(),
            "dataloading_host_count": jax.process_count(),
            "global_mesh": self.trainer.mesh,
            "global_batch_size": rows,
            "worker_count": config.worker_count,
            "worker_buffer_size": config.worker_buffer_size,
        }
        if config.use_infinite_eval:
            return lmeval_preprocessing_pipeline(
                dataset=requests,
                tokenizer_path=config.tokenizer_path,
                bos_token_id=self.bos_token_id,
                eos_token_id=self.eos_token_id,
                padding_multiple=config.infinite_eval_chunksize,
                **options,
            )
        windows = HFTokenizeLogLikelihoodRolling(
            config.tokenizer_path, max_length=columns, batch_size=rows, bos_token_id=self.bos_token_id
        )
        return make_grain_llm_iterator(
            dataset=windows.map(requests),
            max_target_length=columns,
            shuffle=False,
            data_shuffle_seed=0,
            num_epochs=1,
            operations=[InferSegmentations(self.eos_token_id)],
            shift=False,
            apply_padding=False,
            batch_class=LLMIndexedBatch,
            **options,
        )

    def eval_function(
        self,
        params: Any,
        apply_fn: Any,
        batch: Batch,
        rng: jax.Array | None = None,
        mutable_variables: Mapping[str, Any] | None = None,
    ) -> tuple[Mapping[str, Any], PyTree]:
        """Compute the log-likelihood, the hits and the number of targets of each row of a device."""
        del rng  # nothing is drawn
        variables = {"params": params, **(mutable_variables or {})}
        return score_rows(apply_fn, variables, batch, self.trainer.model_axis_name)

    # Reading chunk by chunk.

    def create_jitted_functions(self) -> None:
        """Create the steps, compiled at their first call: one for whole batches, or one for chunks."""
        super().create_jitted_functions()
        self._chunk_reader = functools.cache(functools.partial(ChunkReader, self.trainer))
        if self.config.use_infinite_eval:
            self.eval_step = self.create_recurrent_evaluation_step_function(self.config.infinite_eval_chunksize)

    def init_eval_metrics(
        self, batch: Batch | None = None, alternative_eval_step: Callable | None = None
    ) -> FrozenDict:
        """Return the metrics before the first batch; there are none where batches are read chunk by chunk."""
        return (
            FrozenDict() if self.config.use_infinite_eval else super().init_eval_metrics(batch, alternative_eval_step)
        )

    def create_recurrent_evaluation_step_function(
        self,
        chunk_size: int,
        exmp_batch: LLMIndexedBatch | None = None,
        cache_init_fn: Callable[[PyTree], PyTree] | None = None,
    ) -> Callable[[EvalState | TrainState, LLMIndexedBatch, Metrics | None], ImmutableMetrics]:
        """Return an evaluation step that reads a batch of any length chunk by chunk.

        Args:
            chunk_size: The tokens of a chunk.
            exmp_batch: An example of a batch: all have as many rows. That of the evaluation by default.
            cache_init_fn: Makes the state before the first chunk from its shapes; the model's own by default.

        Returns:
            A function `(state, batch, metrics) -> metrics`. It returns the metrics of the rows of its batch alone.
        """
        example = self.exmp_batch if exmp_batch is None else exmp_batch
        reader = self._chunk_reader(chunk_size, example.inputs.shape[0])

        def evaluate(
            state: EvalState | TrainState, batch: LLMIndexedBatch, metrics: Metrics | None
        ) -> ImmutableMetrics:
            del metrics
            if isinstance(state, TrainState):
                state = EvalState.from_train_state(train_state=state)
            if cache_init_fn is None:
                cache = reader.init_cache(state)
            else:
                cache = cache_init_fn(jax.eval_shape(reader.init_cache, state))
            return reader.read(state, batch, cache)[0]

        return evaluate

    # Generation.

    def _read_prompt(self, number: int, request: Any) -> Prompt:
        context, options = request.args
        options = harness("models.utils").normalize_gen_kwargs(options)
        max_new_tokens, temperature = options["max_gen_toks"], options.get("temperature", 0.0)
        tokens = [self.bos_token_id, *self.tokenizer(context, add_special_tokens=False)["input_ids"]]
        if not self.config.use_infinite_eval:
            context_length = self.exmp_batch.inputs.shape[1]
            if max_new_tokens >= context_length:
                raise ValueError(
                    f"A task generates {max_new_tokens} tokens, which leaves no room for prompts in context_length "
                    f"{context_length}: raise it, or set use_infinite_eval."
                )
            tokens = tokens[max_new_tokens - context_length :]
        ignored = set(options) - SAMPLING_OPTIONS if temperature else set()
        return Prompt(number, tokens, options["until"], max_new_tokens, temperature, ignored)

    def _generate(self, prompts: Sequence[Prompt], key: jax.Array) -> list[list[int]]:
        """Return the tokens that follow each prompt, without the end-of-document token.

        Columns in which all prompts have tokens are read chunk by chunk, the rest token by token.
        """
        num_rows, chunk_size = self.exmp_batch.inputs.shape[0], self.config.infinite_eval_chunksize
        rows = [prompt.tokens for prompt in prompts]
        rows += rows[-1:] * (num_rows - len(rows))
        lengths = np.array([len(row) for row in rows])
        is_given = np.arange(math.ceil(lengths.max() / chunk_size) * chunk_size) < lengths[:, None]
        tokens = np.zeros(is_given.shape, np.int32)
        tokens[is_given] = np.concatenate(rows)
        self.trainer.token_check.check_ids("The prompts", tokens[is_given])
        num_read = (lengths.min() - 1) // chunk_size * chunk_size
        cache = self._read_tokens(tokens[:, :num_read])
        tokens, is_given = tokens[:, num_read:], is_given[:, num_read:]

        max_new_tokens = prompts[0].max_new_tokens
        generate = self._generate_fn(tokens.shape[1] + max_new_tokens, prompts[0].temperature)
        results = generate(self.trainer.state, key, tokens, is_given, cache)
        generated, _ = multihost_utils.process_allgather(results, tiled=True)
        answers = (row[length - num_read :][:max_new_tokens] for row, length in zip(generated, lengths, strict=True))
        return [list(itertools.takewhile(lambda token: token != self.eos_token_id, row.tolist())) for row in answers]

    def _read_tokens(self, tokens: np.ndarray) -> PyTree:
        """Return the state after columns of tokens; their number is a multiple of the chunk size."""
        trainer, reader = self.trainer, self._chunk_reader(self.config.infinite_eval_chunksize, len(tokens))
        no_document = np.zeros(len(tokens), np.int32)
        batch = LLMIndexedBatch.from_inputs(tokens, no_document, no_document, targets=tokens)
        state = self._eval_state()
        placed = place_batch(batch, trainer.mesh, trainer.batch_partition_specs)
        return reader.read(state, placed, reader.init_cache(state))[1]

    def _create_generate_fn(self, max_length: int, temperature: float) -> GenerateFn:
        return self.trainer.get_generate_fn(
            max_length=max_length,
            eod_token_id=self.eos_token_id,
            token_sample_fn=functools.partial(temperature_sampling, temperature=temperature),
        )


def fuse_document_results(
    results_dict: Mapping[str, np.ndarray | tuple[np.ndarray, np.ndarray] | Any],
) -> list[tuple[float, bool]]:
    """Sum the rows of each document.

    Args:
        results_dict: The metrics of rows, as `LMEvalEvaluation.eval_model` returns them.

    Returns:
        The log-likelihood of each document, and whether all of its targets are the most likely ones, in the order of
        their indices. Rows of document 0 are padding.
    """
    loglikelihoods, _ = results_dict[f"loglikelihood_{KEEPS_SUMS}"]
    num_hits, num_targets = results_dict[f"accuracies_{KEEPS_SUMS}"]
    documents, rows = np.unique(results_dict[f"document_idx_{KEEPS_VALUES}"], return_inverse=True)
    sums = (np.bincount(rows.reshape(-1), weights=values) for values in (loglikelihoods, num_hits, num_targets))
    return [
        (float(loglikelihood), bool(hits == targets))
        for document, loglikelihood, hits, targets in zip(documents, *sums, strict=True)
        if document != 0
    ]


def log_info(msg: str) -> None:
    """Log a message in the first process."""
    if jax.process_index() == 0:
        LOGGER.info("%s", msg)
