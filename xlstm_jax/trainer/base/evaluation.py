"""Evaluation: one pass over data with the compiled step."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax.core import FrozenDict
from jax.sharding import Mesh
from rich.progress import track

from xlstm_jax.common_types import ImmutableMetrics, Metrics, PyTree, TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.base.hooks import CallbackHooks
from xlstm_jax.trainer.data_module import DataIterator, kept_in_place
from xlstm_jax.trainer.logger.base_logger import Logger
from xlstm_jax.trainer.logger.console import ConsoleLogger
from xlstm_jax.trainer.placement import zeros_on_mesh
from xlstm_jax.trainer.run.clock import Clock
from xlstm_jax.trainer.token_check import TokenCheck

LOGGER = logging.getLogger(__name__)

DataLoaders = DataIterator | dict[str, DataIterator]
EvalStep = Callable[[Any, Batch, Metrics | None], ImmutableMetrics]


class Evaluation(CallbackHooks):
    """Evaluates the model of a trainer."""

    state: TrainState
    eval_step: EvalStep
    logger: Logger
    clock: Clock
    global_step: int
    exmp_batch: Batch
    mesh: Mesh
    token_check: TokenCheck
    _eval_metric_shapes: PyTree

    def init_eval_metrics(self, batch: Batch | None = None) -> FrozenDict:
        """Return the metrics before the first batch of an evaluation."""
        if self._eval_metric_shapes is None:
            batch = self.exmp_batch if batch is None else batch
            self._eval_metric_shapes = jax.eval_shape(self.eval_step, self.state, batch, None)
        return zeros_on_mesh(self._eval_metric_shapes, self.mesh)

    def check_data(self, **loaders: DataLoaders | None) -> None:
        """Raise unless the model has all token ids of some data, and all texts are of one tokenizer.

        The data are compared with each other and with the tokenizers of the callbacks, before anything is read.

        Args:
            **loaders: The data by name, each one set or several sets by name.

        Raises:
            ConfigError: A set has more ids than the model, or is of another tokenizer than the first.
        """
        self.token_check.check_data(
            loaders, {type(callback).__name__: callback.vocabulary for callback in self.callbacks}
        )

    def eval_model(self, data_loader: DataLoaders, mode: str, epoch_idx: int) -> dict[str, Any]:
        """Evaluate the model.

        Args:
            data_loader: The batches, or several sets of them by name.
            mode: Under what to log, such as `val` or `test`.
            epoch_idx: The index of the epoch.

        Returns:
            The metrics, averaged over the data; those of named sets under `<set>_<metric>`.
        """
        self.check_data(**{mode: data_loader})
        self.logger.start_epoch(epoch_idx, self.global_step, mode=mode)
        if isinstance(data_loader, Mapping):
            metrics = FrozenDict(
                {
                    f"{name}_{key}": value
                    for name, loader in data_loader.items()
                    for key, value in self._run_model_eval(loader, f"{mode}/{name}", epoch_idx).items()
                }
            )
        else:
            metrics = self._run_model_eval(data_loader, mode, epoch_idx)
        _, host_metrics = self.logger.end_epoch(metrics, self.global_step)
        return host_metrics

    def test_model(self, test_loader: DataLoaders, apply_callbacks: bool = False, epoch_idx: int = 0) -> dict[str, Any]:
        """Evaluate the model in mode `test`, with or without the hooks of callbacks."""
        if apply_callbacks:
            self.on_test_epoch_start(epoch_idx)
        metrics = self.eval_model(test_loader, mode="test", epoch_idx=epoch_idx)
        if apply_callbacks:
            self.on_test_epoch_end(metrics, epoch_idx)
        return metrics

    def test_eval_function(self, val_loader: DataLoaders | None) -> None:
        """Evaluate one batch of each set: what is wrong with them shows before the training, not after an epoch."""
        if val_loader is None:
            LOGGER.info("There is no validation: val_loader is None.")
            return
        loaders: dict[str, Any] = {"val": val_loader}
        if isinstance(val_loader, Mapping):
            loaders = dict(val_loader)
        for name, loader in loaders.items():
            with kept_in_place(loader):
                batch = next(self.token_check.check_batches(iter(loader), loader), None)
            if batch is None:
                raise ValueError(
                    f"The loader {name!r} for validation is empty: it has fewer examples than a batch, its files hold "
                    "nothing, or it is an iterator that is used up. Pass None for no validation."
                )
            with self.clock.measure("compile"):
                jax.block_until_ready(self.eval_step(self.state, batch, self.init_eval_metrics(batch)))

    def _run_model_eval(self, data_loader: DataIterator, mode: str = "", epoch_idx: int = -1) -> Any:
        """Return the accumulated metrics of all batches, still on the device."""
        metrics = None
        batches = iter(self.tracker(data_loader, desc=f"{mode} {epoch_idx}"))
        for batch in self.token_check.check_batches(batches, data_loader):
            metrics = self.eval_step(self.state, batch, self.init_eval_metrics(batch) if metrics is None else metrics)
        if metrics is None:
            raise ValueError(f"The loader for {mode!r} gave no batch: it is empty or used up.")
        return metrics

    def tracker(self, iterator: Any, **kwargs: Any) -> Iterator:
        """Iterate, with a progress bar on a terminal; `desc` and `total` are those of tqdm."""
        console = next((tool.console for tool in self.logger.log_tools if isinstance(tool, ConsoleLogger)), None)
        if console is None or not console.is_terminal:
            return iter(iterator)
        # Without a total, rich asks for a length, and takes no for an answer.
        description, total = kwargs.get("desc", ""), kwargs.get("total")
        return iter(track(iterator, description=description, total=total, console=console, transient=True))
