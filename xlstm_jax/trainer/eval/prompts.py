"""Prompts of generation requests, and their batches."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Prompt(NamedTuple):
    """The prompt of a request."""

    number: int
    """The index of the request."""
    tokens: list[int]
    until: list[str]
    """Texts that end the continuation."""
    max_new_tokens: int
    temperature: float
    ignored: set[str]
    """Sampling options of the request that are not supported."""

    @property
    def options(self) -> tuple[int, float]:
        """The options that all prompts of a batch share."""
        return self.max_new_tokens, self.temperature


def batch_prompts(prompts: Sequence[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Yield batches of at most `size` prompts with the same options, sorted by length."""
    by_options = sorted(prompts, key=lambda prompt: (*prompt.options, -len(prompt.tokens)))
    for _, group in itertools.groupby(by_options, key=lambda prompt: prompt.options):
        alike = list(group)
        for start in range(0, len(alike), size):
            yield alike[start : start + size]
