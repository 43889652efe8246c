"""The trainer: builds a model on a mesh, then trains, validates and tests it.

Users subclass it. It owns the parts of a run: `training_program` builds model, state and steps, `training_loop` goes
through epochs and validations, and each further part has a file of its own.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict
from jax.sharding import AbstractMesh, Mesh

from xlstm_jax.common_types import HostMetrics, ImmutableMetrics, Metrics
from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer.base.bad_steps import BadStepHandler
from xlstm_jax.trainer.base.compiled_step import out_of_memory_is_reported
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.evaluator import DataLoaders, Evaluator, tracked
from xlstm_jax.trainer.base.hooks import CallbackHooks
from xlstm_jax.trainer.base.param_utils import get_num_params
from xlstm_jax.trainer.base.run_checkpoints import RunCheckpoints, read_configs, replace_parts
from xlstm_jax.trainer.base.run_metrics import RunMonitor
from xlstm_jax.trainer.base.training_loop import Outcome, TrainingLoop
from xlstm_jax.trainer.base.training_program import TrainingProgram
from xlstm_jax.trainer.base.validation import ValidationSchedule
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.callbacks.checkpointing import check_folders, load_pretrained_model
from xlstm_jax.trainer.data_module import DataIterator, DataloaderModule, as_replayable
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.default_tools import with_default_tools
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig
from xlstm_jax.trainer.run.clock import Heartbeat
from xlstm_jax.trainer.run.plan import Plan, describe_data, describe_mesh, plan_run
from xlstm_jax.trainer.run.progress import Progress
from xlstm_jax.trainer.run.saved_run import set_loaders
from xlstm_jax.trainer.run.signals import Interrupts, TrainingInterrupted
from xlstm_jax.trainer.token_check import TokenCheck
from xlstm_jax.utils.startup import STARTUP, describe_startup

__all__ = ["TrainerConfig", "TrainerModule"]

LOGGER = logging.getLogger(__name__)


class TrainerModule(TrainingProgram, CallbackHooks):
    """Trains a model. A subclass implements `loss_function`, and may override any other method.

    Args:
        trainer_config: How to train.
        model_config: The model to train.
        optimizer_config: How to update parameters.
        batch: An example of a global batch; its shapes (`jax.ShapeDtypeStruct`) suffice.
        mesh: The devices; by default, arranged as `model_config.parallel` says.

    Attributes:
        state: The train state, sharded over the mesh.
        train_step: `(state, batch, metrics) -> (state, metrics)`, compiled; it overwrites its arguments.
        eval_step: `(state, batch, metrics) -> metrics`, compiled.
        progress: How far the run has come, as checkpoints save it.
        global_step: The number of steps so far.
        exmp_batch: The example batch.
        batch_partition_specs: How the rows of a batch are sharded.
        state_partition_specs: How the state is sharded.
        optimizer: The gradient transformation.
        lr_scheduler: The learning rate by step.
        logger: Logs metrics.
        log_path: The folder of the run, or `None`.
        callbacks: The callbacks, in the order of their configs.
        evaluator: Evaluates the model on data sets.
        validation: Decides when to validate.
        bad_steps: Acts on bad steps.
        dataset: The argument of `set_dataset`.
        should_stop: If set to true, the run ends after the current step or validation.
        status: How the last training ended: `success`, `nan` (bad step), `skipped` (too many), `interrupted`, `error`.
        clock: Measures where the time goes.
        monitor: Counts tokens and bad steps.
        token_check: Compares the token ids of data with the vocabulary of the model.
        compiled_memory: The memory that the training step needs, once `compile_train_step` has compiled it.
    """

    config_class: type[TrainerConfig] = TrainerConfig
    """The class that the config of a trainer in a checkpoint is read as."""

    def __init__(
        self,
        trainer_config: TrainerConfig,
        model_config: ModelConfig,
        optimizer_config: OptimizerConfig,
        batch: Batch,
        mesh: Mesh | AbstractMesh | None = None,
    ):
        # First of all the mesh: it connects the processes, whose numbers the logger needs.
        super().__init__(trainer_config, model_config, optimizer_config, batch, mesh)
        self.progress = Progress()
        self.validation = ValidationSchedule(trainer_config, self.progress)
        self.token_check = TokenCheck(model_config.num_token_ids)
        self.first_step = True
        self.should_stop = False
        self.status: str | None = None
        self.dataset: Any = None
        self.init_logger(trainer_config.logger)
        self.build()
        self.init_callbacks(trainer_config.callbacks)

    @property
    def global_step(self) -> int:
        """The number of steps so far."""
        return self.progress.step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.progress.step = step

    @property
    def checkpoints(self) -> RunCheckpoints:
        """Reads the checkpoints of the run, which the callbacks write."""
        return RunCheckpoints(self.callbacks, self.progress, self.clock, self.heartbeat)

    def init_logger(self, logger_config: LoggerConfig | None) -> None:
        """Create the logger and the parts that log: monitor, heartbeat, evaluator and bad-step handler."""
        if logger_config is not None:
            shows_progress = self.trainer_config.enable_progress_bar
            logger_config = with_default_tools(logger_config, shows_progress=shows_progress)
        self.logger = Logger(logger_config, metric_postprocess_fn=self.get_metric_postprocess_fn())
        self.log_path = self.logger.log_path
        self.logger.log_config(
            {"trainer": self.trainer_config, "model": self.model_config, "optimizer": self.optimizer_config}
        )
        self.monitor = RunMonitor(self.clock, self.progress, self.model_config.model_config, self.mesh.size)
        self.logger.monitors.append(self.monitor)
        self.logger.step_clock = lambda: self.clock.training_seconds
        is_first = jax.process_index() == 0
        self.heartbeat = Heartbeat(self.log_path / "heartbeat.json" if self.log_path and is_first else None)
        self.evaluator = Evaluator(self._add_batch, self.logger, self.clock, self.token_check)
        self.bad_steps = BadStepHandler(self.trainer_config, self.progress, self.logger, self.monitor)

    def init_callbacks(self, callback_configs: Sequence[CallbackConfig]) -> None:
        """Create the callbacks."""
        self.callbacks: list[Callback] = []
        for config in callback_configs:
            if isinstance(config, type):
                raise ConfigError(f"callbacks has the class {config.__name__}: give a config, {config.__name__}(...).")
            self.callbacks.append(config.create(trainer=self, data_module=None))
        check_folders(self.callbacks)
        if self.bad_steps.rolls_back and self.checkpoints.callback is None:
            raise ConfigError("To roll back, a run needs checkpoints: add a ModelCheckpointConfig to its callbacks.")

    def set_dataset(self, dataset: Any) -> None:
        """Store a description of the data for callbacks."""
        self.dataset = dataset

    def get_metric_postprocess_fn(self) -> Callable[[HostMetrics], HostMetrics]:
        """Return a function that is applied to metrics on the host before they are logged."""
        return lambda metrics: metrics

    def train_model(
        self,
        train_loader: DataIterator,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
        num_epochs: int | None = None,
        num_train_steps: int | None = None,
        steps_per_epoch: int | None = None,
    ) -> dict[str, Any]:
        """Train from the current state until a number of epochs or steps.

        Args:
            train_loader: The batches to train on.
            val_loader: The data to validate on, one set or several by name; `None` for no validation. The batches of a
                one-pass iterator are cached in host memory, up to 1 GiB; likewise of `test_loader`.
            test_loader: The data to test on after training, with the latest checkpoint if there is one.
            num_epochs: The number of epochs; give this or `num_train_steps`.
            num_train_steps: The number of steps.
            steps_per_epoch: The length of an epoch; that of the loader by default.

        Returns:
            The metrics of each evaluation, under `val_step_<step>`, `val_epoch_<epoch>` and `test`.

        Raises:
            TrainingInterrupted: A signal interrupted the run. The state is saved if a callback saves states.
        """
        self.check_data(train=train_loader, val=val_loader, test=test_loader)
        plan = plan_run(train_loader, num_epochs, num_train_steps, steps_per_epoch)
        progress, interrupts, status = self.progress, Interrupts(), "error"
        progress.step = int(self.state.step)
        progress.num_drawn = max(progress.num_drawn, progress.step)
        self.should_stop = False
        self.clock.start()
        self.state = self.bad_steps.reset(self.state)
        try:
            with interrupts.watch():
                val_loader, test_loader = self._start_training(plan, train_loader, val_loader, test_loader)
                loop = TrainingLoop(self, plan, train_loader, val_loader, interrupts)
                outcome = loop.run()
                status = {Outcome.BAD_STEP: "nan", Outcome.INTERRUPTED: "interrupted"}.get(outcome, "success")
                if status == "success" and self.bad_steps.has_skipped_too_many(self.state.guard):
                    status = "skipped"
                if outcome is Outcome.INTERRUPTED:
                    self.on_training_interrupted(loop.epoch_idx, progress.step)
                    raise TrainingInterrupted(loop.signal_number, progress.step)
                self.on_training_end()
                if number := interrupts.received(progress.step, may_wait=True):
                    status = "interrupted"
                    raise TrainingInterrupted(number, progress.step)
            if test_loader is not None and status == "success":
                if self.checkpoints.latest_step() not in (None, progress.step):
                    self.load_model()
                epoch_idx = plan.epoch_at(max(progress.num_drawn - 1, 0), max(progress.num_epochs_finished - 1, 0))
                loop.results["test"] = self.test_model(test_loader, apply_callbacks=True, epoch_idx=epoch_idx)
        finally:
            self.clock.stop()
            self.status = status
            with contextlib.ExitStack() as stack:  # All parts are finalized, even if one of them raises.
                for part in reversed((self.logger, *self.callbacks)):
                    stack.callback(part.finalize, status)
        return loop.results

    def _start_training(
        self, plan: Plan, train_loader: DataIterator, val_loader: DataLoaders | None, test_loader: DataLoaders | None
    ) -> tuple[DataLoaders | None, DataLoaders | None]:
        """Log the start of a training, tell callbacks, and return replayable loaders for validation and test."""
        self.logger.on_training_start(step=self.global_step)
        self.monitor.start(self.global_step)
        self.monitor.data_statistics = getattr(train_loader, "get_statistics", dict)
        self.log_training_info(
            plan.num_epochs, plan.num_train_steps, plan.steps_per_epoch, train_loader, val_loader, test_loader
        )
        val_loader, test_loader = as_replayable(val_loader), as_replayable(test_loader)
        self.on_training_start()
        STARTUP.end("callbacks")
        self.test_eval_function(val_loader)
        STARTUP.end("validation")
        for callback in self.callbacks:
            callback.set_dataset(DataloaderModule(train_loader, val_loader, test_loader))
        if self.bad_steps.rolls_back:
            self.checkpoints.prepare_rollbacks(train_loader)
        return val_loader, test_loader

    def take_step(self, batch: Batch) -> None:
        """Train on a batch."""
        progress, metrics = self.progress, self._placed_train_metrics(batch)
        if not self.first_step:
            with jax.profiler.StepTraceAnnotation("train_step", step_num=progress.step):
                self.state, progress.train_metrics = self.train_step(self.state, batch, metrics)
            return
        STARTUP.end("first batch")
        with out_of_memory_is_reported(self.mesh.local_devices[0]):
            with self.clock.measure("compile") as span:
                self.state, progress.train_metrics = self.train_step(self.state, batch, metrics)
            jax.block_until_ready(progress.train_metrics)
        self.first_step = False
        STARTUP.end("first step")
        if startup := STARTUP.finish():
            LOGGER.info("Until the end of the first step: %s.", describe_startup(startup))
            self.logger.log_host_metrics(startup, progress.step, mode="startup")
        if self.compiled_memory is None:
            LOGGER.info("The training step was compiled in %.1f s.", span.seconds)
        self.logger.restart_timer(progress.step)

    def _placed_train_metrics(self, batch: Batch) -> Metrics:
        """Return the running metrics on the mesh: those of a checkpoint unless they were logged with its step."""
        metrics = self.progress.train_metrics
        is_restored = any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(metrics))
        if metrics is not None and not is_restored:
            return metrics
        zeros, restored = self.init_train_metrics(batch), FrozenDict(metrics or {})
        if jax.tree.structure(zeros) != jax.tree.structure(restored) or self.logger.is_due(self.global_step - 1):
            return zeros
        return jax.tree.map(lambda zero, x: jax.device_put(x.astype(zero.dtype), zero.sharding), zeros, restored)

    def log_training_info(
        self,
        num_epochs: int | None,
        num_train_steps: int,
        steps_per_epoch: int | None,
        train_loader: DataIterator,
        val_loader: DataLoaders | None,
        test_loader: DataLoaders | None,
    ) -> None:
        """Log the sizes of model and data, and the mesh."""
        step = self.global_step
        sizes = {
            "num_params": self.get_num_params(),
            "num_optimizer_params": get_num_params(self.state.opt_state),
            "start_step": step,
        }
        plan = Plan(num_train_steps, steps_per_epoch, num_epochs)
        num_rows = jax.tree.leaves(self.exmp_batch)[0].shape[0]
        loaders = {"train": train_loader, "val": val_loader, "test": test_loader}
        self.logger.log_host_metrics(sizes, step, mode="model")
        self.logger.log_host_metrics(describe_data(plan, loaders, num_rows, self.mesh), step, mode="dataset")
        self.logger.log_host_metrics(describe_mesh(self.mesh, jax.process_count()), step, mode="parallel")

    def check_data(self, **loaders: DataLoaders | None) -> None:
        """Check that the token ids of data fit the model, and that all texts use one tokenizer.

        The data are compared with each other and with the tokenizers of callbacks, before any batch is read.

        Args:
            **loaders: The data by name, each one set or several sets by name.

        Raises:
            ConfigError: A set has more ids than the model, or another tokenizer than the first.
        """
        self.token_check.check_data(
            loaders, {type(callback).__name__: callback.vocabulary for callback in self.callbacks}
        )

    def eval_model(self, data_loader: DataLoaders, mode: str, epoch_idx: int) -> dict[str, Any]:
        """Evaluate the model.

        Args:
            data_loader: The batches, or several sets of them by name.
            mode: The mode to log in, such as `val` or `test`.
            epoch_idx: The index of the epoch.

        Returns:
            The metrics, averaged over the data; those of named sets are `<set>_<metric>`.
        """
        self.check_data(**{mode: data_loader})
        return self.evaluator.evaluate(data_loader, mode, epoch_idx, self.global_step, self._run_model_eval)

    def _run_model_eval(self, data_loader: DataIterator, mode: str = "", epoch_idx: int = -1) -> Any:
        """Return the accumulated metrics of all batches, still on the device."""
        batches = self.tracker(data_loader, desc=f"{mode} {epoch_idx}")
        return self.evaluator.accumulate(batches, data_loader, mode)

    def _add_batch(self, batch: Batch, metrics: Metrics | None) -> ImmutableMetrics:
        return self.eval_step(self.state, batch, self.init_eval_metrics(batch) if metrics is None else metrics)

    def _eval_model_in_train_loop(self, val_loader: DataLoaders, epoch_idx: int) -> dict[str, Any]:
        jax.block_until_ready(self.state.step)  # Steps that still run are not part of the time of a validation.
        with self.clock.measure("evaluation"):
            self.on_validation_epoch_start(epoch_idx=epoch_idx, step_idx=self.global_step)
            metrics = self.eval_model(val_loader, mode="val", epoch_idx=epoch_idx)
            self.validation.record(metrics)
            self.on_validation_epoch_end(metrics, epoch_idx=epoch_idx, step_idx=self.global_step)
        return metrics

    def test_model(self, test_loader: DataLoaders, apply_callbacks: bool = False, epoch_idx: int = 0) -> dict[str, Any]:
        """Evaluate the model in mode `test`, with or without the hooks of callbacks."""
        if apply_callbacks:
            self.on_test_epoch_start(epoch_idx)
        metrics = self.eval_model(test_loader, mode="test", epoch_idx=epoch_idx)
        if apply_callbacks:
            self.on_test_epoch_end(metrics, epoch_idx)
        return metrics

    def test_eval_function(self, val_loader: DataLoaders | None) -> None:
        """Evaluate one batch of each set, so that errors show before the training and not after an epoch."""
        self.evaluator.try_first_batches(val_loader)

    def tracker(self, iterator: Any, **kwargs: Any) -> Iterator:
        """Iterate, with a progress bar on a terminal; `desc` and `total` are those of tqdm."""
        return tracked(iterator, self.logger, kwargs.get("desc", ""), kwargs.get("total"))

    def load_model(self, step_idx: int = -1, raise_if_not_found: bool = True) -> None:
        """Load a checkpoint of this run.

        Args:
            step_idx: Its step; -1 for the newest valid one.
            raise_if_not_found: Whether it is an error if there is none.
        """
        if raise_if_not_found or self.checkpoints.has_any():
            with self.clock.measure("restart"):
                self.restore_model(self.checkpoints.read_state(step_idx))

    def load_data_loaders(
        self,
        step_idx: int = -1,
        train_loader: DataLoaders | None = None,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
    ) -> None:
        """Set loaders to their positions in a checkpoint of this run."""
        self.restore_data_loaders(self.checkpoints.read_data(step_idx), train_loader, val_loader, test_loader)

    def restore_model(self, state_dict: Mapping[str, Any]) -> None:
        """Replace the state.

        Args:
            state_dict: `params`, and optionally `step`, `opt_state`, `mutable_variables`, `rng`, `guard`, and the other
                results of `ModelCheckpoint.load_model`. Arrays may be on the host; they are sharded like those that
                they replace.
        """
        self.state = replace_parts(self.state, state_dict)
        self.validation.forget()
        self.checkpoints.restore_run(state_dict, int(self.state.step))

    @staticmethod
    def restore_data_loaders(
        state_dict: Mapping[str, Any],
        train_loader: DataLoaders | None = None,
        val_loader: DataLoaders | None = None,
        test_loader: DataLoaders | None = None,
    ) -> None:
        """Set loaders to saved positions.

        Args:
            state_dict: The states of loaders under `train`, `val` or `val_<name>`, and `test` or `test_<name>`.
            train_loader: The loader for training; `None` leaves it alone, as for the others.
            val_loader: The loaders for validation.
            test_loader: The loaders for tests.
        """
        set_loaders(DataloaderModule(train_loader, val_loader, test_loader), state_dict)

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
            load_best: Whether to load the best checkpoint instead of the latest.
            load_optimizer: Whether to load the optimizer state, the step and the random key too.
            train_loader: A loader to set to its saved position.
            val_loader: Loaders to set to their saved positions.
            test_loader: Loaders to set to their saved positions.
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

        It neither logs nor has callbacks: to resume training, build a trainer from configs and load the checkpoint.

        Args:
            checkpoint: The folder of the run, with `checkpoints` in it.
            exmp_input: An example of a batch; `example_batch` by default.
            batch_size: The rows of that default example; one per device by default.
            mesh: The devices; by default, arranged as in the run, which needs as many devices.
            step_idx: The step of the checkpoint; -1 for the newest valid one.
            load_best: Whether to load the best checkpoint instead.

        Returns:
            The trainer.
        """
        *configs, step = read_configs(checkpoint, cls.config_class, step_idx, best=load_best)
        if exmp_input is None:
            num_devices = jax.device_count() if mesh is None else mesh.size
            exmp_input = cls.example_batch(batch_size if batch_size > 0 else num_devices)
        construct: Any = cls
        trainer = construct(*configs, exmp_input, mesh=mesh)
        trainer.load_pretrained_model(checkpoint, step_idx=step)
        return trainer

    @classmethod
    def example_batch(cls, num_rows: int) -> Batch:
        """Return the shapes of a batch, for a trainer that is built from a checkpoint alone."""
        raise ValueError(f"{cls.__name__} does not know what its {num_rows} rows look like: pass an exmp_input.")

    def run_state(self) -> dict[str, Any]:
        """Return the progress and the clock of the run, for a checkpoint."""
        return self.checkpoints.run_state()

    def state_is_good(self) -> bool:
        """Check that no bad step has stopped the state from changing, so that it may be saved. Waits for the device."""
        return self.bad_steps.is_good(self.state.guard)
