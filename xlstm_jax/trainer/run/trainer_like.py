"""The interface of the trainer for callbacks and checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from xlstm_jax.common_types import HostMetrics, PyTree, TrainState
from xlstm_jax.configs import ConfigDict
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.logger.base_logger import Logger
from xlstm_jax.trainer.run.clock import Clock
from xlstm_jax.trainer.run.progress import Progress
from xlstm_jax.trainer.token_check import TokenCheck


class SavedCallback(Protocol):
    """The part of a callback that a checkpoint saves and restores."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint saves as JSON."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...

    def arrays(self) -> dict[str, PyTree]:
        """Return the arrays that a checkpoint saves, by unique names."""
        ...

    def load_arrays(self, arrays: Mapping[str, PyTree]) -> None:
        """Restore what `arrays` returned."""
        ...


class TrainerSettings(Protocol):
    """The settings of a trainer that callbacks read."""

    debug: bool
    seed_eval: int

    def to_dict(self) -> dict[str, Any]:
        """Return all settings as plain values."""
        ...


class TrainerLike(Protocol):
    """The interface of a trainer for callbacks and checkpoints.

    `TrainerModule` has all of it and documents each member; a test may use anything that has the members it needs.
    """

    state: TrainState
    progress: Progress
    should_stop: bool

    @property
    def global_step(self) -> int:
        """The number of steps so far."""
        ...

    @property
    def trainer_config(self) -> TrainerSettings:
        """The config of the trainer."""
        ...

    @property
    def model_config(self) -> ConfigDict:
        """The config of the model."""
        ...

    @property
    def optimizer_config(self) -> ConfigDict:
        """The config of the optimizer."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        ...

    @property
    def axis_names(self) -> tuple[str, ...]:
        """All mesh axes: data, FSDP, pipeline and model, then others."""
        ...

    @property
    def data_axis_name(self) -> str:
        """The mesh axis of data parallelism."""
        ...

    @property
    def fsdp_axis_name(self) -> str:
        """The mesh axis that parameters are sharded over."""
        ...

    @property
    def pipeline_axis_name(self) -> str:
        """The mesh axis of pipeline parallelism."""
        ...

    @property
    def model_axis_name(self) -> str:
        """The mesh axis of tensor parallelism."""
        ...

    @property
    def exmp_batch(self) -> Batch:
        """An example of a batch, maybe only its shapes."""
        ...

    @property
    def batch_partition_specs(self) -> P:
        """The sharding of the rows of a batch."""
        ...

    @property
    def state_partition_specs(self) -> PyTree:
        """The sharding of the train state."""
        ...

    @property
    def lr_scheduler(self) -> optax.Schedule:
        """The learning rate by update."""
        ...

    @property
    def callbacks(self) -> Sequence[SavedCallback]:
        """The callbacks of the run."""
        ...

    @property
    def logger(self) -> Logger:
        """The logger of the run."""
        ...

    @property
    def log_path(self) -> Path | None:
        """The folder of the run."""
        ...

    @property
    def clock(self) -> Clock:
        """Measures where the time goes."""
        ...

    @property
    def token_check(self) -> TokenCheck:
        """Compares token ids with the vocabulary of the model."""
        ...

    def state_is_good(self) -> bool:
        """Check that the state may be saved."""
        ...

    def run_state(self) -> dict[str, Any]:
        """Return the progress and the clock of the run, for a checkpoint."""
        ...

    def eval_model(self, data_loader: Any, mode: str, epoch_idx: int) -> HostMetrics:
        """Evaluate the model and log the metrics."""
        ...

    def tracker(self, iterator: Any, **kwargs: Any) -> Iterator:
        """Iterate, with a progress bar on a terminal."""
        ...
