"""An exponential moving average (EMA) of the parameters, often a better model than the last parameters."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import ConfigError, refuse_ignored
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.data_module import DataloaderModule, kept_in_place
from xlstm_jax.trainer.optimizer.schedule_free import started_from
from xlstm_jax.trainer.run.trainer_like import TrainerLike
from xlstm_jax.utils.partitioned import map_unboxed

ITEM = "ema_params"
"""The name of the average in a checkpoint."""
MODE = "val_ema"
"""The mode that the metrics of the average are logged in."""


@dataclasses.dataclass(kw_only=True, frozen=False)
class ParameterEMAConfig(CallbackConfig):
    """Config of the parameter average."""

    every_n_steps: int = 1
    decay: float = 0.999
    """The weight of the old average in an update. The average covers about `every_n_steps / (1 - decay)` steps."""
    evaluate: bool = True
    """Whether each validation is followed by one of the average, in mode `val_ema`."""

    def __post_init__(self):
        self._check_runs_in_all_processes()
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay is {self.decay}, but has to be at least 0 and less than 1.")
        if self.every_n_steps < 1:
            raise ConfigError(f"every_n_steps is {self.every_n_steps}: it has to be 1 or more.")
        if not self.evaluate:
            refuse_ignored(self, {"every_n_epochs": "without evaluate"})

    def create(self, trainer: TrainerLike, data_module: DataloaderModule | None = None) -> "ParameterEMA":
        """Build the callback."""
        return ParameterEMA(self, trainer, data_module)


class ParameterEMA(Callback):
    """Averages the parameters over the steps: `average = decay * average + (1 - decay) * params`.

    The average is always float32, with the sharding of the parameters. It starts as a copy of them, so there is no bias
    to correct. An update is one program that overwrites the average on the devices, and the host does not wait for it.

    Args:
        config: How to average.
        trainer: The trainer.
        data_module: The data of the run.
    """

    def __init__(self, config: ParameterEMAConfig, trainer: TrainerLike, data_module: DataloaderModule | None = None):
        super().__init__(config, trainer, data_module)
        self.config = config
        shardings = jax.tree.map(lambda x: x.sharding, trainer.state.params)
        self._copy = jax.jit(_copied, out_shardings=shardings)
        self._update = jax.jit(
            functools.partial(_updated, decay=config.decay), donate_argnums=0, out_shardings=shardings
        )
        self._params: PyTree = None

    @property
    def params(self) -> PyTree:
        """The average; before training, a copy of the parameters."""
        if self._params is None:
            self._params = self._copy(self.trainer.state.params)
        return self._params

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the parameters of the trainer by the average within a block, which must not train."""
        state = self.trainer.state
        params = map_unboxed(_placed_like, state.params, self.params)
        self.trainer.state = state.replace(params=params, opt_state=started_from(state.opt_state, params))
        try:
            yield
        finally:
            self.trainer.state = state

    def on_training_start(self) -> None:
        """Start the average, unless it was restored."""
        if self._params is None:
            self._params = self._copy(self.trainer.state.params)

    def on_filtered_training_step(self, step_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Update the average. A bad step has not changed the parameters."""
        self._params = self._update(self.params, self.trainer.state.params)

    def on_filtered_validation_epoch_end(self, eval_metrics: Mapping[str, Any], epoch_idx: int, step_idx: int) -> None:
        """Validate the average too."""
        if self.config.evaluate and self.data_module is not None and self.data_module.val_dataloader is not None:
            val_loader = self.data_module.val_dataloader
            with self.swapped(), kept_in_place(val_loader):
                self.trainer.eval_model(val_loader, mode=MODE, epoch_idx=epoch_idx)

    def arrays(self) -> dict[str, PyTree]:
        """Return the average."""
        return {ITEM: self.params}

    def load_arrays(self, arrays: Mapping[str, PyTree]) -> None:
        """Restore the average of a checkpoint; without one, restart it from the parameters."""
        stored = arrays.get(ITEM)
        if stored is not None:
            stored = map_unboxed(
                lambda param, x: jax.device_put(x.astype(jnp.float32), param.sharding),
                self.trainer.state.params,
                stored,
            )
        self._params = stored


def _copied(params: PyTree) -> PyTree:
    # A copy even where nothing is cast: the next step overwrites the parameters.
    return jax.tree.map(lambda x: jnp.copy(x.astype(jnp.float32)), params)


def _updated(average: PyTree, params: PyTree, *, decay: float) -> PyTree:
    return jax.tree.map(lambda mean, x: mean + (1 - decay) * (x.astype(jnp.float32) - mean), average, params)


def _placed_like(param: jax.Array, average: jax.Array) -> jax.Array:
    # The dtype and the sharding of the parameter, for which the evaluation was compiled.
    return jax.device_put(average.astype(param.dtype), param.sharding)
