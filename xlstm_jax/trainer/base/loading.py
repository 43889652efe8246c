"""What a trainer takes from checkpoints: its state, the position in the data, or all of itself."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from xlstm_jax.checkpoint.files import checkpoint_folder
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.common_types import PyTree, TrainState
from xlstm_jax.configs import ConfigDict
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.run_metrics import RunMonitor
from xlstm_jax.trainer.callbacks.callback import Callback
from xlstm_jax.trainer.callbacks.checkpointing import ModelCheckpoint, load_pretrained_model
from xlstm_jax.trainer.callbacks.saved_run import MODEL_PARTS, named_loaders, restore_callbacks
from xlstm_jax.trainer.data_module import DataIterator, DataloaderModule
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.optimizer.schedule_free import started_from
from xlstm_jax.trainer.run.clock import Clock, Heartbeat
from xlstm_jax.trainer.run.progress import Progress
from xlstm_jax.utils.partitioned import is_partitioned, reboxed, unboxed

LOGGER = logging.getLogger(__name__)

DataLoaders = DataIterator | dict[str, DataIterator]


class CheckpointLoading:
    """Loads checkpoints into a trainer."""

    config_class: type[TrainerConfig]
    callbacks: list[Callback]
    state: TrainState
    clock: Clock
    monitor: RunMonitor
    heartbeat: Heartbeat
    progress: Progress
    global_step: int
    _validation_metrics: dict[str, Any]

    def load_model(self, step_idx: int = -1, raise_if_not_found: bool = True) -> None:
        """Load a checkpoint of this run.

        Args:
            step_idx: Its step; -1 for the newest that is valid.
            raise_if_not_found: Whether it is an error if there is none.
        """
        checkpoints = self._checkpoints()
        if checkpoints is None or not (raise_if_not_found or checkpoints.store.has_any()):
            if raise_if_not_found:
                raise ValueError(
                    "This trainer saves no checkpoints: add a ModelCheckpointConfig to its callbacks, or load those of "
                    "another run with load_pretrained_model."
                )
            return
        with self.clock.measure("restart"):
            self.restore_model(checkpoints.load_model(step_idx))

    def load_data_loaders(
        self,
        step_idx: int = -1,
        train_loader: DataLoaders | None = None,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
    ) -> None:
        """Set loaders to where they were at a checkpoint of this run."""
        checkpoints = self._checkpoints()
        if checkpoints is None:
            raise ValueError("This trainer saves no checkpoints: add a ModelCheckpointConfig to its callbacks.")
        self.restore_data_loaders(checkpoints.load_dataloader(step_idx), train_loader, val_loader, test_loader)

    def restore_model(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state.

        Args:
            state_dict: `params`, and where given `step`, `opt_state`, `mutable_variables`, `rng`, `guard`, and what
                `ModelCheckpoint.load_model` returns besides. Arrays may be on the host; they go to where those that
                they replace are.
        """
        if "params" not in state_dict:
            raise ValueError(f"A state needs 'params', but has only: {', '.join(state_dict) or 'nothing'}.")
        parts = ("step", "params", "opt_state", "mutable_variables", "rng", "guard")
        self.state = self.state.replace(
            **{
                name: _place_like(state_dict[name], getattr(self.state, name))
                for name in parts
                if state_dict.get(name) is not None
            }
        )
        if state_dict.get("opt_state") is None:
            self.state = self.state.replace(opt_state=started_from(self.state.opt_state, self.state.params))
        self._validation_metrics = {}
        run = state_dict.get("run") or {}
        self.progress.restore(run, step=int(self.state.step))
        if run:
            self._restore_clock(run)
        restore_callbacks(self.callbacks, state_dict)

    @staticmethod
    def restore_data_loaders(
        state_dict: Mapping[str, Any],
        train_loader: DataLoaders | None = None,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
    ) -> None:
        """Set loaders to where they were.

        Args:
            state_dict: The states of loaders under `train`, `val` or `val_<name>`, and `test` or `test_<name>`.
            train_loader: The loader for training, if it is to be set.
            val_loader: The loaders for validation.
            test_loader: The loaders for tests.
        """
        for name, loader in named_loaders(DataloaderModule(train_loader, val_loader, test_loader)).items():
            if name not in state_dict:
                LOGGER.warning("The checkpoint has no state of the loader %r: it starts from its beginning.", name)
            elif not hasattr(loader, "set_state"):
                LOGGER.warning("The loader %r has no `set_state`: it starts from its beginning.", name)
            else:
                loader.set_state(state_dict[name])

    def load_pretrained_model(
        self,
        checkpoint_path: Path | str,
        step_idx: int = -1,
        load_best: bool = False,
        load_optimizer: bool = True,
        train_loader: DataLoaders | None = None,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
        delete_params_before_loading: bool = True,
    ) -> int:
        """Load a checkpoint of any run.

        Args:
            checkpoint_path: The folder of the run, with `checkpoints` in it.
            step_idx: The step; -1 for the latest, or the best.
            load_best: Whether to take the best checkpoint instead of the latest.
            load_optimizer: Whether to take over the optimizer state, the step and the random key too.
            train_loader: A loader to set to where it was.
            val_loader: Loaders to set to where they were.
            test_loader: Loaders to set to where they were.
            delete_params_before_loading: Whether to free the parameters first.

        Returns:
            The step of the checkpoint.
        """
        with self.clock.measure("restart"):
            state_dict, data_state, step = load_pretrained_model(
                checkpoint_path=checkpoint_path,
                trainer=self,
                step_idx=step_idx,
                load_optimizer=load_optimizer,
                load_best=load_best,
                delete_params_before_loading=delete_params_before_loading,
            )
            self.restore_model(state_dict)
            if any(loader is not None for loader in (train_loader, val_loader, test_loader)):
                self.restore_data_loaders(data_state, train_loader, val_loader, test_loader)
        return step

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint: str | Path,
        exmp_input: Batch | None = None,
        batch_size: int = -1,
        mesh: Mesh | None = None,
        *,
        step_idx: int = -1,
        load_best: bool = False,
    ) -> Any:
        """Build a trainer from the metadata of a checkpoint, with its state, to evaluate or generate with.

        It neither logs nor calls back: to resume training, build a trainer from configs and load the checkpoint.

        Args:
            checkpoint: The folder of the run, with `checkpoints` in it.
            exmp_input: An example of a batch; made by `example_batch` if `None`.
            batch_size: The rows of such an example; one for each device by default.
            mesh: The devices; arranged as those of the run were by default, of which there have to be as many.
            step_idx: The step of the checkpoint; -1 for the newest that is valid.
            load_best: Whether to take the best checkpoint instead.

        Returns:
            The trainer.
        """
        store = CheckpointStore(checkpoint_folder(checkpoint), read_only=True)
        step = store.select(step_idx, best=load_best, items={*MODEL_PARTS, "metadata"})
        metadata = store.read_metadata(step)
        # What only a training run needs: to roll back, say, takes the callback that saves.
        left_out = ("logger", "callbacks", "bad_steps")
        trainer_dict = {key: value for key, value in metadata["trainer"].items() if key not in left_out}
        config = ConfigDict.from_dict(cls.config_class, {**trainer_dict, "logger": None})
        if exmp_input is None:
            num_devices = jax.device_count() if mesh is None else mesh.size
            exmp_input = cls.example_batch(batch_size if batch_size > 0 else num_devices)
        construct: Any = cls
        trainer = construct(
            config,
            ModelConfig.from_metadata(json.dumps(metadata)),
            ConfigDict.from_dict(OptimizerConfig, metadata["optimizer"]),
            exmp_input,
            mesh=mesh,
        )
        trainer.load_pretrained_model(checkpoint, step_idx=step)
        return trainer

    @classmethod
    def example_batch(cls, num_rows: int) -> Batch:
        """Return the shapes of a batch, for a trainer that is built from a checkpoint alone."""
        raise ValueError(f"{cls.__name__} does not know what its {num_rows} rows look like: pass an exmp_input.")

    def run_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps about the run, beside its arrays and the position in the data."""
        return {
            **self.progress.to_document(),
            "clock": self.clock.id,
            "seconds": self.clock.seconds,
        }

    def _restore_clock(self, run: Mapping[str, Any]) -> None:
        saved, lost = sum(run["seconds"].values()), self.clock.elapsed
        if run["clock"] == self.clock.id:
            lost -= saved
        else:
            lost += max(self.heartbeat.read().get("elapsed", 0.0) - saved, 0.0)
        self.clock.resume(run["seconds"], lost=lost)

    def _checkpoints(self) -> ModelCheckpoint | None:
        return next((callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)), None)


def _place_like(tree: PyTree, like: PyTree) -> PyTree:
    """Put arrays where those of another tree are, in boxes like theirs."""

    def place(old: Any, new: Any) -> Any:
        value, target = unboxed(new), unboxed(old)
        if value.shape != target.shape:
            raise ValueError(f"An array of shape {value.shape} cannot take the place of one of shape {target.shape}.")
        is_in_place = isinstance(value, jax.Array) and value.sharding == target.sharding
        return reboxed(old, value if is_in_place else jax.device_put(value, target.sharding))

    return jax.tree.map(place, like, tree, is_leaf=is_partitioned)
