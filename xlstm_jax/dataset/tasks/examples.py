"""Tasks with exact answers, drawn endlessly from a seed: a task is a function that draws one sequence."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from xlstm_jax.dataset.batch import LLMBatch


class Example(NamedTuple):
    """One sequence of a task."""

    inputs: Int[np.ndarray, "n"]
    targets: Int[np.ndarray, "n"]
    """The answer at each position, from the inputs up to and including that position."""
    mask: Bool[np.ndarray, "n"]
    """The positions that have an answer."""


Task = Callable[[np.random.Generator, int], Example]
"""Draws a sequence of a given length; other parameters of a task are bound with `functools.partial`."""


def draw_parity(generator: np.random.Generator, length: int) -> Example:
    """Draw bits and ask at every position whether the number of ones so far is odd.

    There are two tokens, 0 and 1, as inputs and as targets. The targets are the parities of all prefixes: the accuracy
    at position n is that on sequences of length n.
    """
    bits = generator.integers(0, 2, length)
    return Example(bits, np.cumsum(bits) % 2, np.ones(length, bool))


def draw_recall(
    generator: np.random.Generator, length: int, *, num_pairs: int, num_keys: int, num_values: int
) -> Example:
    """Draw pairs of a key and a value, then show each key again with its value as the target.

    This is multi-query associative recall. The pairs come first and their keys differ; the queries follow in random
    order, at random places between blanks. Token 0 is the blank, followed by the keys and the values:
    `1 + num_keys + num_values` tokens.
    """
    num_places = length - 2 * num_pairs
    if not 1 <= num_pairs <= min(num_keys, num_places):
        raise ValueError(
            f"num_pairs is {num_pairs}, but must be from 1 to num_keys {num_keys}, and at most a third of the length "
            f"{length}: a pair takes two positions and its query one."
        )
    keys = 1 + generator.permutation(num_keys)[:num_pairs]
    values = 1 + num_keys + generator.integers(0, num_values, num_pairs)
    places = 2 * num_pairs + generator.permutation(num_places)[:num_pairs]
    inputs, targets = np.zeros(length, np.int64), np.zeros(length, np.int64)
    inputs[: 2 * num_pairs] = np.stack([keys, values], axis=1).reshape(-1)
    inputs[places], targets[places] = keys, values
    return Example(inputs, targets, targets > 0)


def draw_batch(
    task: Task, generator: np.random.Generator, batch_size: int, *, min_length: int, max_length: int
) -> LLMBatch:
    """Draw a batch of sequences, each padded to a row of `max_length`.

    Args:
        task: Draws a sequence.
        generator: The source of randomness: generators of the same seed give the same batches.
        batch_size: The number of rows.
        min_length: The length of the shortest sequences.
        max_length: The length of the longest sequences; all lengths in the range are equally likely.

    Returns:
        The batch. The segmentation of the targets is 1 at answers, and 0 elsewhere.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(f"min_length is {min_length}, but must be from 1 to max_length {max_length}.")
    lengths = generator.integers(min_length, max_length, batch_size, endpoint=True)
    return stack_examples([task(generator, int(length)) for length in lengths], max_length)


def stack_examples(examples: Sequence[Example], length: int) -> LLMBatch:
    """Make a batch of sequences, each padded to a row of `length`.

    The segmentation of the targets is 1 at answers, and 0 elsewhere.
    """
    inputs, targets, masks = zip(*examples, strict=True)
    positions = _pad([np.arange(len(row)) for row in inputs], length)
    return LLMBatch(
        inputs=_pad(inputs, length),
        targets=_pad(targets, length),
        inputs_position=positions,
        inputs_segmentation=_pad([np.ones(len(row)) for row in inputs], length),
        targets_position=positions.copy(),
        targets_segmentation=_pad(masks, length),
    )


def _pad(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Stack rows of different lengths, zero-padded."""
    padded = np.zeros((len(rows), length), np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
