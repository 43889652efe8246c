"""The interface to lm-eval: its modules, the class of its models, and the numbers in its results."""

import contextlib
import importlib
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from xlstm_jax.common_types import HostMetrics
from xlstm_jax.trainer.logger.values import import_extra


class AnswersRequests(Protocol):
    """An evaluation that answers the requests of lm-eval, each an `Instance`."""

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether it is the most likely one."""
        ...

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each document."""
        ...

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return a continuation of each context."""
        ...

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation."""
        ...


def harness(module: str) -> Any:
    """Import a module of lm-eval."""
    import_extra("lm_eval", extra="eval")
    return importlib.import_module(f"lm_eval.{module}")


def create_lm(evaluation: AnswersRequests, name: str) -> Any:
    """Return an object of the model class of lm-eval.

    Args:
        evaluation: Answers the requests.
        name: Identifies tokenizer and chat template: lm-eval distinguishes cached prompts by it.
    """

    class TrainedLM(harness("api.model").LM):
        @property
        def tokenizer_name(self) -> str:
            return name

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return evaluation.loglikelihood(requests)

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return evaluation.loglikelihood_rolling(requests)

        def generate_until(self, requests: list[Any]) -> list[str]:
            return evaluation.generate_until(requests)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return evaluation.apply_chat_template(chat_history, add_generation_prompt)

    return TrainedLM()


def numbers(result: Mapping[str, Any]) -> HostMetrics:
    """Return the numbers in a result of lm-eval; those that do not apply become NaN."""
    values = {name: math.nan if value == "N/A" else value for name, value in result.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


@contextlib.contextmanager
def preserve_random_states() -> Iterator[None]:
    """Restore the random states of Python and NumPy at the end of a block, as lm-eval seeds both."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
