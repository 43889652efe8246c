"""Samples of text that the model generates at each evaluation."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from xlstm_jax.configs import ConfigError, check_seed, refuse_ignored
from xlstm_jax.dataset.tokenizers.light import BYTE_TOKENIZER
from xlstm_jax.dataset.tokenizers.text_encoder import TextEncoder
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary
from xlstm_jax.inference.sampling import temperature_sampling
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.run.trainer_like import TrainerLike
from xlstm_jax.trainer.token_check import TokenCheck

LOGGER = logging.getLogger(__name__)

LOGGED_CHARACTERS = 80
"""The characters of a sample in the log; the file has the whole sample."""


@dataclasses.dataclass(kw_only=True, frozen=False)
class TextSamplesConfig(CallbackConfig):
    """Config of text samples: the prompts, and how to sample."""

    prompts: list[str | list[int]]
    """Each is a text or its tokens."""
    max_length: int = 256
    """The maximum number of tokens of a sample, prompt included."""
    num_samples: int = 1
    """The number of continuations of each prompt."""
    temperature: float = 1.0
    """Temperature of sampling; 0 always takes the most likely token."""
    eod_token_id: int = -1
    """The token that ends a sample; -1 if none does."""
    tokenizer: Any = None
    """The path or name of a tokenizer, or anything that can `encode` a text and `decode` tokens; by default a token is
    a byte."""
    seed: int = 0
    """Seed of sampling."""

    def __post_init__(self):
        self._check_runs_in_all_processes()
        if not self.prompts:
            raise ConfigError("prompts is empty: give at least one text to continue.")
        if self.num_samples < 1:
            raise ConfigError(f"num_samples is {self.num_samples}: it has to be 1 or more.")
        check_seed("seed", self.seed)
        if not self.temperature >= 0:  # NaN too
            raise ConfigError(f"temperature is {self.temperature}, but must be a number of at least 0.")
        reasons = {"every_n_steps": "on samples, which are written at validations"}
        refuse_ignored(self, reasons | ({"seed": "at temperature 0"} if self.temperature == 0 else {}))

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "TextSamples":
        """Build the callback."""
        return TextSamples(self, trainer, data_module)


@runtime_checkable
class GeneratingTrainer(Protocol):
    """A trainer whose model generates text, such as `LLMTrainer`."""

    def get_generate_fn(
        self, max_length: int, eod_token_id: int, token_sample_fn: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Return a function that continues sequences."""
        ...


class TextSamples(Callback):
    """Writes samples to `<log_path>/samples/step_<step>.txt`, and logs their beginnings.

    All samples are generated in one batch, by a program that is compiled once. The same parameters give the same
    samples.

    Args:
        config: The prompts and how to continue them.
        trainer: A trainer with `get_generate_fn`, such as `LLMTrainer`.
        data_module: The data of the run.
    """

    def __init__(self, config: TextSamplesConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        super().__init__(config, trainer, data_module)
        self.config = config
        given = BYTE_TOKENIZER if config.tokenizer is None else config.tokenizer
        self.tokenizer: Any = given
        known = None
        if isinstance(given, str | Path):
            encoder = TextEncoder(str(given))
            known, self.tokenizer = Vocabulary.of_tokenizer(encoder), encoder.tokenizer
        self._prompts = [self._encode(prompt) for prompt in config.prompts for _ in range(config.num_samples)]
        if known is not None:  # The model gets only the token ids of the prompts.
            self.vocabulary = dataclasses.replace(known, size=1 + max(map(max, self._prompts)))
        if not isinstance(trainer, GeneratingTrainer):
            raise ConfigError(
                f"TextSamples needs a trainer with get_generate_fn, which {type(trainer).__name__} lacks."
            )
        self._generate = trainer.get_generate_fn(
            max_length=config.max_length,
            eod_token_id=config.eod_token_id,
            token_sample_fn=functools.partial(temperature_sampling, temperature=config.temperature),
        )

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Write samples."""
        self.write(step_idx)

    def on_test_epoch_end(self, test_metrics: Mapping[str, Any], epoch_idx: int) -> None:
        """Write samples."""
        self.write(self.trainer.global_step)

    def generate(self) -> list[tuple[str, str]]:
        """Return prompts and their continuations."""
        lengths = np.array([len(prompt) for prompt in self._prompts])
        is_given = np.arange(lengths.max()) < lengths[:, None]
        prefix = np.zeros(is_given.shape, np.int32)
        prefix[is_given] = np.concatenate(self._prompts)
        mask = None if is_given.all() else jnp.asarray(is_given)  # Without one, prompts are read in one pass.
        results = self._generate(self.trainer.state, jax.random.PRNGKey(self.config.seed), jnp.asarray(prefix), mask)
        tokens, is_valid = multihost_utils.process_allgather(results, tiled=True)
        decode = self.tokenizer.decode
        return [
            (decode(prompt), decode(row[valid].tolist()[len(prompt) :]))
            for prompt, row, valid in zip(self._prompts, tokens, is_valid, strict=True)
        ]

    def write(self, step_idx: int) -> None:
        """Generate samples; the first process writes them down."""
        samples = self.generate()
        if jax.process_index() != 0:
            return
        for prompt, text in samples:
            LOGGER.info("Sample at step %d: %r ... %r", step_idx, prompt, text[:LOGGED_CHARACTERS])
            self.trainer.logger.log_text(f"{prompt!r} continued", prompt + text, step_idx)
        if self.trainer.log_path is not None:
            folder = self.trainer.log_path / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            content = "\n".join(f"--- {prompt!r}\n{text}\n" for prompt, text in samples)
            (folder / f"step_{step_idx}.txt").write_text(content, encoding="utf-8")

    def _encode(self, prompt: str | list[int]) -> list[int]:
        encoded = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = list(getattr(encoded, "ids", encoded))  # The library tokenizers has them in an `Encoding`.
        if not 1 <= len(tokens) < self.config.max_length:
            raise ValueError(
                f"The prompt {prompt!r} has {len(tokens)} tokens, but needs at least one and fewer than max_length "
                f"{self.config.max_length}."
            )
        getattr(self.trainer, "token_check", TokenCheck(None)).check_ids(f"The tokens of the prompt {prompt!r}", tokens)
        return tokens
