"""Evaluation: passes over data with a compiled step, logged as epochs."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from flax.core import FrozenDict
from rich.progress import track

from xlstm_jax.common_types import ImmutableMetrics, Metrics
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.data_module import DataIterator, kept_in_place
from xlstm_jax.trainer.logger.base_logger import Logger
from xlstm_jax.trainer.logger.console import ConsoleLogger
from xlstm_jax.trainer.run.clock import Clock
from xlstm_jax.trainer.token_check import TokenCheck

LOGGER = logging.getLogger(__name__)

DataLoaders = DataIterator | dict[str, DataIterator]
EvalStep = Callable[[Any, Batch, Metrics | None], ImmutableMetrics]


class Evaluator:
    """Evaluates a model on data sets.

    Args:
        add_batch: Adds the metrics of a batch to those so far, which are `None` before the first batch.
        logger: The logger of the run.
        clock: The clock of the run.
        token_check: Checks the token ids of batches.
    """

    def __init__(
        self,
        add_batch: Callable[[Batch, Metrics | None], ImmutableMetrics],
        logger: Logger,
        clock: Clock,
        token_check: TokenCheck,
    ):
        self._add_batch = add_batch
        self._logger = logger
        self._clock = clock
        self._token_check = token_check

    def evaluate(
        self,
        data_loader: DataLoaders,
        mode: str,
        epoch_idx: int,
        step_idx: int,
        run: Callable[[DataIterator, str, int], Any],
    ) -> dict[str, Any]:
        """Evaluate one data set or several by name, and log the metrics.

        Args:
            data_loader: The batches, or several sets of them by name.
            mode: The mode to log in.
            epoch_idx: The index of the epoch.
            step_idx: The step to log at.
            run: Called as `run(loader, mode, epoch_idx)`, it accumulates the metrics of one set.

        Returns:
            The metrics on the host; those of named sets are `<set>_<metric>`.
        """
        self._logger.start_epoch(epoch_idx, step_idx, mode=mode)
        if isinstance(data_loader, Mapping):
            metrics = FrozenDict(
                {
                    f"{name}_{key}": value
                    for name, loader in data_loader.items()
                    for key, value in run(loader, f"{mode}/{name}", epoch_idx).items()
                }
            )
        else:
            metrics = run(data_loader, mode, epoch_idx)
        _, host_metrics = self._logger.end_epoch(metrics, step_idx)
        return host_metrics

    def accumulate(self, batches: Iterable, data_loader: DataIterator, mode: str) -> ImmutableMetrics:
        """Return the metrics of all batches, still on the device.

        Args:
            batches: The batches of the loader.
            data_loader: The loader, which may know its tokenizer.
            mode: The name of the data in error messages.
        """
        metrics = None
        for batch in self._token_check.check_batches(iter(batches), data_loader):
            metrics = self._add_batch(batch, metrics)
        if metrics is None:
            raise ValueError(f"The loader for {mode!r} gave no batch: it is empty or used up.")
        return metrics

    def try_first_batches(self, val_loader: DataLoaders | None) -> None:
        """Evaluate one batch of each set, so that errors show before the training and not after an epoch."""
        if val_loader is None:
            LOGGER.info("There is no validation: val_loader is None.")
            return
        loaders: dict[str, Any] = {"val": val_loader}
        if isinstance(val_loader, Mapping):
            loaders = dict(val_loader)
        for name, loader in loaders.items():
            with kept_in_place(loader):
                batch = next(self._token_check.check_batches(iter(loader), loader), None)
            if batch is None:
                raise ValueError(
                    f"The loader {name!r} for validation is empty: it has fewer examples than a batch, its files hold "
                    "nothing, or it is an iterator that is used up. Pass None for no validation."
                )
            with self._clock.measure("compile"):
                jax.block_until_ready(self._add_batch(batch, None))


def tracked(iterator: Any, logger: Logger, description: str = "", total: float | None = None) -> Iterator:
    """Iterate, with a progress bar if the logger has a console that is a terminal."""
    console = next((tool.console for tool in logger.log_tools if isinstance(tool, ConsoleLogger)), None)
    if console is None or not console.is_terminal:
        return iter(iterator)
    # Without a total, rich calls len() if the iterator has one, and fails if that raises.
    return iter(track(iterator, description=description, total=total, console=console, transient=True))
