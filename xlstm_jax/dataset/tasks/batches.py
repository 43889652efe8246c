"""Batches of examples of a formal task, each a function of the seed and the step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.dataset.configs import FormalTaskDataConfig
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator, rows_of_process
from xlstm_jax.dataset.states import check_keys
from xlstm_jax.dataset.tasks.examples import stack_examples
from xlstm_jax.dataset.tasks.formal_languages import TASKS, FormalTask, draw_example
from xlstm_jax.dataset.tokenizers.vocabulary import Vocabulary


def task_vocabulary(config: FormalTaskDataConfig) -> Vocabulary:
    """Return the vocabulary of a task: its symbols."""
    return Vocabulary(len(_find_task(config).vocabulary), f"task {config.task!r}")


class TaskBatches(Iterator[LLMBatch]):
    """Yields the rows of this process, batch after batch, endlessly.

    Args:
        config: The task and the batches.
        own_rows: Maps the number of rows in a batch to the indices of the rows of this process.
    """

    def __init__(self, config: FormalTaskDataConfig, own_rows: Callable[[int], np.ndarray] = np.arange):
        self._config = config
        self._task = _find_task(config)
        self._rows = own_rows(config.global_batch_size).tolist()
        needed = self._task.row_length(config.max_length)
        self._length = config.max_target_length or needed
        if self._length < needed:
            raise ValueError(
                f"max_target_length is {self._length}, but {config.task} needs rows of {needed} tokens for strings of "
                f"max_length {config.max_length}."
            )
        self._index = 0

    def __iter__(self) -> "TaskBatches":
        return self

    def __next__(self) -> LLMBatch:
        config = self._config
        first = self._index * config.global_batch_size
        examples = [
            draw_example(
                self._task,
                config.data_shuffle_seed,
                first + row,
                min_length=config.min_length,
                max_length=config.max_length,
            )
            for row in self._rows
        ]
        self._index += 1
        return stack_examples(examples, self._length)

    def get_state(self) -> dict[str, Any]:
        """Return the position of the iterator, for JSON; it is the same in every process."""
        return {"data": self._describe(), "index": self._index}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resume the state of an iterator of the same task."""
        check_keys(state, "data", "index")
        if state["data"] != self._describe():
            raise ValueError(f"The state is of {state['data']}, but here there is {self._describe()}.")
        self._index = state["index"]

    def _describe(self) -> dict[str, Any]:
        names = ("task", "min_length", "max_length", "global_batch_size", "data_shuffle_seed")
        return {**{name: getattr(self._config, name) for name in names}, "length": self._length}


def make_task_iterator(config: FormalTaskDataConfig, global_mesh: Mesh) -> MultiHostDataLoadIterator:
    """Make an iterator over global batches of a task.

    Args:
        config: The task and the batches.
        global_mesh: The mesh; the rows of a batch are sharded over all of its devices.

    Returns:
        The iterator. If data is shuffled, every epoch has its own examples; otherwise all epochs have the same.
    """
    return MultiHostDataLoadIterator(
        TaskBatches(config, lambda num_rows: rows_of_process(global_mesh, num_rows)),
        global_mesh,
        iterator_length=config.num_batches,
        dataset_size=config.num_batches * config.global_batch_size,
        reset_after_epoch=not config.shuffle_data,
        prefetch=1,
        vocabulary=task_vocabulary(config),
    )


def _find_task(config: FormalTaskDataConfig) -> FormalTask:
    if config.task not in TASKS:
        raise ConfigError(f"task: there is no task {config.task!r}, only {', '.join(TASKS)}.")
    return TASKS[config.task]
