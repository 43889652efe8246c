"""Open a run in its folder, from settings to a trainer that is ready to train."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from xlstm_jax.checkpoint.files import checkpoint_folder
from xlstm_jax.configs import ConfigError, nearest
from xlstm_jax.dataset import DataIterator, LLMBatch, create_data_iterator, create_mixed_data_iterator
from xlstm_jax.dataset.configs import TextDataConfig
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.sources.text_measures import TextMeasures, measure_text
from xlstm_jax.dataset.sources.vocabulary_lookup import find_vocabulary
from xlstm_jax.dataset.tokenizers.vocabulary import MissingTokenizerError, Vocabulary, check_vocabularies
from xlstm_jax.distributed.mesh_utils import initialize_mesh
from xlstm_jax.recipes.compilation_cache import enable_compilation_cache
from xlstm_jax.recipes.compose import CONFIG_FILE, resolved
from xlstm_jax.recipes.data import DataRecipe
from xlstm_jax.recipes.lock import locked
from xlstm_jax.recipes.memory_check import check_memory, warn_of_step_memory
from xlstm_jax.recipes.performance import Performance, describe_devices, reject, resolve_performance
from xlstm_jax.recipes.processes import from_first_process
from xlstm_jax.recipes.rejected import RejectedFolder
from xlstm_jax.recipes.run_config import RunConfig, build_run
from xlstm_jax.recipes.run_vocabulary import read_vocabulary, write_vocabulary
from xlstm_jax.trainer.base.compiled_step import StepDoesNotFitError
from xlstm_jax.trainer.callbacks.run_report import RunReportConfig
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.llm.trainer import LLMTrainer
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLoggerConfig
from xlstm_jax.trainer.logger.file_logger import FileLoggerConfig
from xlstm_jax.trainer.metrics import get_metrics
from xlstm_jax.utils.files import write_atomically
from xlstm_jax.utils.startup import STARTUP

LOGGER = logging.getLogger(__name__)

HYDRA_FOLDER = ".hydra"
COMPOSED_FILE = f"{HYDRA_FOLDER}/config.yaml"
"""The settings of a run with unresolved references, so that on resume derived settings follow a changed one."""
MEASURED_BYTES = 8 * 2**20
"""The maximum amount of validation text to measure; only smaller sets are compared with compressors."""
PRIMING_BYTES = 16 * 2**20
"""The maximum training text for priming a compressor before validation text: xz takes 0.4 s per MiB, twice."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is ready to train."""

    config: RunConfig
    folder: Path
    trainer: LLMTrainer
    train_loader: DataIterator
    val_loader: DataIterator | dict[str, DataIterator] | None
    validation_text: TextMeasures | None
    """Sizes of the validation text and its bits per byte under compressors; `None` if it is not text."""
    performance: Performance
    """The choice of `performance: auto`, which is already applied to the config."""
    initialised_from: str | None
    """What was loaded from another run, and from which step; `None` if nothing was loaded."""
    lock: contextlib.ExitStack
    """The lock on the folder, held until training has ended."""

    def compile(self) -> None:
        """Compile the training step ahead of time.

        Raises:
            StepDoesNotFitError: The step needs more memory than a device has.
        """
        memory, limit = self.trainer.compile_train_step(), self.performance.memory_limit
        if memory is not None and limit is not None and memory.peak > limit:
            raise StepDoesNotFitError(memory.peak, limit)
        if memory is not None:
            warn_of_step_memory(memory, self.trainer.mesh)

    def close_without_room(self, error: StepDoesNotFitError) -> None:
        """Release the folder and the devices, so that the run can be opened again with settings that need less memory.

        Raises:
            ConfigError: `performance: auto` chose no setting, so there is no other choice to try.
        """
        self.lock.close()
        if not self.performance.is_chosen:
            raise ConfigError(
                f"{error} The settings are {self.performance.reason}: set model.remat=full, "
                "trainer.gradient_accumulate_steps or a smaller batch_size; performance=auto chooses what is not set."
            ) from error
        if jax.process_count() > 1 and error.needed is None:
            raise error  # Other processes may wait for this one: only a restart can choose again.
        reject(self.folder, self.performance, error)
        self.trainer.state = None  # pyright: ignore[reportAttributeAccessIssue]

    def train(self) -> dict[str, Any]:
        """Train from the current step to the end and return the metrics of each evaluation."""
        with self.lock:
            return self.trainer.train_model(
                self.train_loader,
                self.val_loader,
                num_epochs=self.config.num_epochs,
                num_train_steps=self.config.num_train_steps,
            )


def open_run(
    settings: Mapping[str, Any],
    folder: Path,
    notes: Mapping[str, Any] | None = None,
    step: int = -1,
    config: RunConfig | None = None,
) -> Run:
    """Prepare the data of a run, build its trainer, and resume from its newest valid checkpoint if it has one.

    Args:
        settings: The composed settings of the run. They are saved in its folder: immediately for a new run, and for an
            existing run once everything else has succeeded.
        folder: The folder of the run.
        notes: Hydra's records of this launch: file name to content.
        step: The step of the checkpoint to resume from, if not the newest valid one.
        config: The config of the run, if it has been built already.

    Returns:
        The run.
    """
    plain = resolved(settings)
    with contextlib.ExitStack() as lock, RejectedFolder(folder) as rejected:
        config = config or build_run(plain)
        STARTUP.end("settings")
        mesh = initialize_mesh(config.model.parallel)  # Initialises distributed JAX, before anything is written.
        enable_compilation_cache()
        check_memory(config, mesh)
        STARTUP.end("devices")
        folder = Path(from_first_process(lambda: str(folder)))
        lock.enter_context(locked(folder))
        if not (folder / CONFIG_FILE).is_file():
            rejected.own()
            write_settings(settings, folder, notes)  # A run killed while it prepares its data can be resumed.
        performance = resolve_performance(config, plain, describe_devices(mesh), folder)
        config = performance.apply(config)
        data = config.data.in_folder(folder)
        if data.prepare is not None:
            prepare_data(data)
            rejected.keep()  # A run resumed with other settings can reuse the shards.
        measures = _measure_validation(data, config.trainer.bytes_per_token)
        config = dataclasses.replace(config, data=data, trainer=_complete_trainer(config, data, folder, measures))
        STARTUP.end("data")
        trainer = LLMTrainer(
            config.trainer,
            config.model,
            config.optimizer,
            LLMBatch.get_dtype_struct(config.batch_size, config.context_length),
            mesh=mesh,
        )
        STARTUP.end("model")
        train_loader, val_loader = _open_loaders(data, trainer.mesh)
        trainer.check_data(train=train_loader, val=val_loader)
        _check_monitored(trainer, val_loader)
        STARTUP.end("data")
        _check_tokenizer_of_source(config.init_from, train_loader.vocabulary)
        source = _load_state(trainer, config, train_loader, val_loader, step)
        STARTUP.end("checkpoint")
        write_settings(settings, folder, notes)
        if train_loader.vocabulary is not None and jax.process_index() == 0:
            write_vocabulary(folder, train_loader.vocabulary)
        return Run(config, folder, trainer, train_loader, val_loader, measures, performance, source, lock.pop_all())


def prepare_data(data: DataRecipe) -> None:
    """Write the shards of a run unless they exist; only the first process writes them."""
    options = data.prepare
    if options is None:
        return
    with _first_process_only() as is_first:
        if is_first:
            prepare(**{field.name: getattr(options, field.name) for field in dataclasses.fields(options)})


def write_settings(settings: Mapping[str, Any], folder: Path, notes: Mapping[str, Any] | None = None) -> None:
    """Save the settings of a run in its folder, as composed and with all references resolved."""
    if jax.process_index() == 0:
        files = {f"{HYDRA_FOLDER}/{name}": content for name, content in (notes or {}).items()}
        files |= {COMPOSED_FILE: dict(settings), CONFIG_FILE: resolved(settings)}
        for name, content in files.items():
            write_atomically(folder / name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a run as composed, with unresolved references if they were saved."""
    file = next((folder / name for name in (COMPOSED_FILE, CONFIG_FILE) if (folder / name).is_file()), None)
    if file is None:
        raise ConfigError(
            f"{folder} holds no {CONFIG_FILE}: give the folder of a run that `xlstm-jax train` has started."
        )
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{file} holds no settings.")
    return settings


def is_run(folder: Path) -> bool:
    """Return whether a folder belongs to a run started by `xlstm-jax train`."""
    return (folder / CONFIG_FILE).is_file() and folder.name not in (HYDRA_FOLDER, "file_logs")


def find_latest(outputs: Path) -> Path:
    """Return the folder of the most recently active run in or below `outputs`; prefer runs with checkpoints."""
    found = [path.parent for path in outputs.rglob(CONFIG_FILE) if is_run(path.parent)]
    if not found:
        raise ConfigError(f"There is no run in {outputs} or below it (no {CONFIG_FILE}): give the folder of a run.")
    with_checkpoints = [folder for folder in found if any(checkpoint_folder(folder).glob("checkpoint_*"))]
    return max(with_checkpoints or found, key=_last_sign_of_life)


def _last_sign_of_life(folder: Path) -> float:
    files = [folder / name for name in (CONFIG_FILE, "heartbeat.json", "output.log")]
    return max(file.stat().st_mtime for file in files if file.exists())


@contextlib.contextmanager
def _first_process_only() -> Iterator[bool]:
    """Yield whether this is the first process; at the end, the other processes wait for it."""
    is_first = jax.process_index() == 0
    yield is_first
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("the first process has prepared the data")


def _measure_validation(data: DataRecipe, bytes_per_token: float | None) -> TextMeasures | None:
    """Measure the validation text, if there is exactly one validation set and it is text.

    Measuring shards needs their tokenizer; a run without it has to set `bytes_per_token`.
    """
    sets = list(data.validation.values())
    if len(sets) != 1 or not isinstance(sets[0], TextDataConfig):
        return None
    training = [each for each in data.train if isinstance(each, TextDataConfig)]
    try:
        measures = measure_text(sets[0], MEASURED_BYTES, training, PRIMING_BYTES)
    except MissingTokenizerError as error:
        if bytes_per_token is None:
            advice = "Validation needs it for bits per byte, unless trainer.bytes_per_token is set."
            raise ConfigError(f"data.{error} {advice}") from error
        LOGGER.warning("The validation text is not measured. %s", error)
        return None
    return dataclasses.replace(measures, compressors={}) if sets[0].max_steps_per_epoch else measures


def _complete_trainer(config: RunConfig, data: DataRecipe, folder: Path, measures: TextMeasures | None) -> Any:
    """Return the trainer config with unset fields filled in from the folder and the data."""
    trainer = config.trainer
    references = measures.compressors if measures else {}
    logger = trainer.logger or LoggerConfig()
    tools = list(logger.log_tools) or [FileLoggerConfig()]
    if trainer.enable_progress_bar and not any(isinstance(tool, ConsoleLoggerConfig) for tool in tools):
        tools.append(ConsoleLoggerConfig(references=references))
    callbacks = []
    for callback in trainer.callbacks:
        if isinstance(callback, TextSamplesConfig) and callback.tokenizer is None:
            callback = _with_tokenizer(callback, find_vocabulary(data.first))
        elif isinstance(callback, RunReportConfig) and not callback.references:
            callback = dataclasses.replace(callback, references=references)
        callbacks.append(callback)
    callbacks.sort(key=lambda callback: isinstance(callback, RunReportConfig))  # It shows files of other callbacks.
    return dataclasses.replace(
        trainer,
        logger=dataclasses.replace(logger, log_path=logger.log_path or folder, log_tools=tools),
        callbacks=callbacks,
        bytes_per_token=trainer.bytes_per_token or (measures.bytes_per_token if measures else None),
    )


def _with_tokenizer(callback: TextSamplesConfig, vocabulary: Vocabulary | None) -> TextSamplesConfig:
    """Set the tokenizer and the end-of-document token of text samples from the data's vocabulary, if it is text."""
    if vocabulary is None or vocabulary.encoder is None:
        return callback
    end = vocabulary.load_tokenizer().eos_token_id
    ends_already = callback.eod_token_id >= 0 or end is None
    return dataclasses.replace(
        callback,
        tokenizer=vocabulary.encoder.tokenizer_path,
        eod_token_id=callback.eod_token_id if ends_already else end,
    )


def _open_loaders(data: DataRecipe, mesh: Mesh) -> tuple[DataIterator, Any]:
    texts = [config for config in data.train if isinstance(config, TextDataConfig)]
    if len(data.train) == 1:
        train = create_data_iterator(data.first, mesh)
    elif len(texts) < len(data.train):
        raise ConfigError("data.mix: only texts can be mixed.")
    else:
        train = create_mixed_data_iterator(texts, mesh, data.weights, data.weights_at_steps)
    validation = {name: create_data_iterator(config, mesh) for name, config in data.validation.items()}
    return train, next(iter(validation.values())) if len(validation) == 1 else validation or None


def _check_monitored(trainer: LLMTrainer, val_loader: Any) -> None:
    """Raise a `ConfigError` before training if a callback monitors a metric that validation does not report."""
    callbacks = [each for each in trainer.trainer_config.callbacks if getattr(each, "monitor", None) is not None]
    if val_loader is None or not callbacks:
        return
    sets = [f"{name}_" for name in val_loader] if isinstance(val_loader, Mapping) else [""]
    _, metrics = get_metrics(jax.tree.map(jnp.ones_like, trainer.init_eval_metrics()), reset_metrics=False)
    named = {f"{prefix}{name}": value for prefix in sets for name, value in metrics.items()}
    reported = sorted({*trainer.get_metric_postprocess_fn()(named), "epoch_time"})
    for callback in callbacks:
        monitor: Any = getattr(callback, "monitor", None)
        if monitor not in reported:
            raise ConfigError(
                f"callbacks: {type(callback).__name__} is to monitor {monitor!r}, but validations report "
                f"{', '.join(reported)}: set monitor to one of them.{nearest(monitor, reported)}"
            )


def _check_tokenizer_of_source(init_from: Path | None, vocabulary: Vocabulary | None) -> None:
    """Raise if the run that another one starts from has another tokenizer than its data."""
    if init_from is not None:
        check_vocabularies(None, {"init_from": read_vocabulary(init_from), "data": vocabulary})


def _load_state(
    trainer: LLMTrainer, config: RunConfig, train_loader: DataIterator, val_loader: Any, step: int
) -> str | None:
    """Resume from a checkpoint of the run, or start from another run; return what was loaded from the latter."""
    trainer.load_model(step, raise_if_not_found=step >= 0)
    if trainer.global_step:
        trainer.load_data_loaders(trainer.global_step, train_loader=train_loader)
        try:
            trainer.load_data_loaders(trainer.global_step, val_loader=val_loader)
        except ValueError as error:
            LOGGER.warning("The run resumes with other validation data, which starts from its beginning: %s", error)
    elif config.init_from is not None:
        step = trainer.load_pretrained_model(config.init_from, load_optimizer=config.init_optimizer)
        parts = "parameters and optimizer state" if config.init_optimizer else "parameters"
        return f"{parts} of {config.init_from}, step {step}"
    return None
