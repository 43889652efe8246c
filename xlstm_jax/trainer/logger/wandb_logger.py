"""Logging of metrics and configs to Weights & Biases."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigDict
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerTool, LoggerToolsConfig
from xlstm_jax.trainer.logger.values import import_extra, json_value, only_numbers, plain_config

LOGGER = logging.getLogger(__name__)

PUBLIC_HOST = "https://api.wandb.ai"
STEP = "step"


@dataclasses.dataclass(kw_only=True, frozen=False)
class WandBLoggerConfig(LoggerToolsConfig):
    """The Weights & Biases run that metrics are logged to."""

    wb_entity: str = "xlstm"
    """The user or team."""
    wb_project: str = "xlstm_nxai"
    """The project."""
    wb_host: str = PUBLIC_HOST
    """The server. The public one may be overridden by the settings of `wandb` on this machine."""
    wb_key: str | None = dataclasses.field(default=None, repr=False)
    """The API key, which `to_dict` leaves out; with `None`, `wandb` uses its usual sources."""
    wb_name: str | None = None
    """The name of the run; `None` lets the server choose one."""
    wb_notes: str | None = None
    """A description of the run."""
    wb_settings: dict[str, Any] = dataclasses.field(default_factory=lambda: {"start_method": "fork"})
    """Fields of `wandb.Settings`; those that the installed `wandb` does not have are ignored, with a warning."""
    wb_tags: list[str] = dataclasses.field(default_factory=list)
    """Tags of the run."""
    wb_resume_id: str | None = None
    """The id of the run to resume; a new run is created if there is none with this id."""
    log_dir: str = "wandb"
    """The folder for local files of `wandb`, inside the folder of the run."""

    def create(self, logger: Logger) -> "WandBLogger":
        """Build the tool."""
        return WandBLogger(self, logger)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dictionary, without the API key."""
        return {**super().to_dict(), "wb_key": None}


class WandBLogger(LoggerTool):
    """Logs numbers as `mode/key` against the training step.

    Several modes log at the same step, and evaluations at earlier steps, so the training step is a separate metric: the
    steps of `wandb` count calls. Successive training runs continue the same `wandb` run. If a run cannot be started,
    nothing is logged until `setup` tries again, as each attempt may wait for the network.

    Args:
        config: The run.
        logger: The logger, which has the folder of the run.
    """

    def __init__(self, config: WandBLoggerConfig, logger: Logger):
        self.config = config
        self.folder = None if logger.log_path is None else Path(logger.log_path) / config.log_dir
        self._wandb = import_extra("wandb", extra="wandb")
        self._run_id = config.wb_resume_id
        self._logged_config: dict[str, Any] = {}
        self._run: Any = None
        self._is_given_up = False

    def log_config(self, config: ConfigDict | dict[str, ConfigDict]) -> None:
        """Log the config, merged with those that were logged before, now or once the run starts."""
        self._logged_config |= json_value(plain_config(config), non_finite=str)
        if self._run is not None:
            self._run.config.update(self._logged_config, allow_val_change=True)

    def setup(self) -> None:
        """Start the run, unless it has started already."""
        self._is_given_up = False
        self._start()

    def log_metrics(self, metrics: dict[str, Any], step: int, epoch: int, mode: str) -> None:
        """Log the numbers."""
        self._start()
        if self._run is not None:
            numbers = {f"{mode}/{name}": value for name, value in only_numbers(metrics).items()}
            self._run.log({**numbers, STEP: step})

    def finalize(self, status: str) -> None:
        """Upload the remaining data and end the run."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if status == "success" else 1)

    def _start(self) -> None:
        if self._run is not None or self._is_given_up:
            return
        self._is_given_up = True
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        run = self._wandb.init(
            entity=self.config.wb_entity,
            project=self.config.wb_project,
            dir=self.folder and str(self.folder),
            id=self._run_id,
            resume="allow" if self._run_id else None,
            name=self.config.wb_name,
            notes=self.config.wb_notes,
            tags=self.config.wb_tags,
            config=self._logged_config,
            settings=self._settings(),
        )
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP)
        self._run, self._run_id, self._is_given_up = run, run.id, False

    def _settings(self) -> Any:
        config = self.config
        host = {} if config.wb_host == PUBLIC_HOST else {"base_url": config.wb_host}
        key = {} if config.wb_key is None else {"api_key": config.wb_key}
        settings = {**host, **key, **config.wb_settings}
        known = {name: value for name, value in settings.items() if name in self._wandb.Settings.model_fields}
        if unknown := sorted(settings.keys() - known.keys()):
            LOGGER.warning("This wandb does not have the settings %s: they are left out.", ", ".join(unknown))
        return self._wandb.Settings(**known)
