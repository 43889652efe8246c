"""Logging of metrics and configs to MLflow."""

import dataclasses
import os
import re
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigDict, flat_config, refuse_ignored
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerTool, LoggerToolsConfig
from xlstm_jax.trainer.logger.values import import_extra, only_numbers, plain_config

FORBIDDEN_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)
LONGEST_NAME = 250
LONGEST_PARAM = 6000
BATCH_SIZE = 100  # The maximum number of parameters in a request.
LAST_SECONDS = 60
STATUSES = {"success": "FINISHED", "interrupted": "KILLED"}


@dataclasses.dataclass(kw_only=True, frozen=False)
class MLflowLoggerConfig(LoggerToolsConfig):
    """The MLflow run that metrics are logged to."""

    tracking_uri: str | None = None
    """The server or database; with `None`, that in `MLFLOW_TRACKING_URI`, or else a SQLite file in `log_dir`."""
    experiment_name: str = "xlstm_jax"
    """The MLflow experiment."""
    run_name: str | None = None
    """The name of the run; `None` lets MLflow choose one."""
    tags: dict[str, str] = dataclasses.field(default_factory=dict)
    """Tags of the run."""
    log_dir: str = "mlflow"
    """The folder inside the folder of the run, used if no server is set."""

    def __post_init__(self):
        if self.tracking_uri is not None:
            refuse_ignored(self, {"log_dir": "beside tracking_uri"})

    def create(self, logger: Logger) -> "MLflowLogger":
        """Build the tool."""
        return MLflowLogger(self, logger)


class MLflowLogger(LoggerTool):
    """Logs numbers as `mode/key`, and the config as parameters.

    A separate thread sends the data, as a server may be slow; an error in that thread is raised by a later call. At the
    end, the thread has a minute to send the remaining data. Successive training runs continue the same MLflow run.
    Characters that MLflow does not allow in names become `_`. If a run cannot be started, nothing is logged until
    `setup` tries again, as each attempt may wait for the network.

    Args:
        config: The run.
        logger: The logger, which has the folder of the run.
    """

    def __init__(self, config: MLflowLoggerConfig, logger: Logger):
        self.config = config
        self.folder = None
        self.tracking_uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._mlflow = import_extra("mlflow", extra="mlflow")
        if not self.tracking_uri:
            if logger.log_path is None:
                raise ValueError("MLflow has no place to log to: set `tracking_uri` or `log_path` of the LoggerConfig.")
            import_extra("sqlalchemy", extra="mlflow")
            self.folder = Path(logger.log_path).absolute() / config.log_dir
            self.tracking_uri = f"sqlite:///{self.folder.as_posix()}/mlflow.db"
        self._unsent_params: dict[str, str] = {}
        self._sent_params: set[str] = set()
        self._client: Any = None
        self._run_id: str | None = None
        self._sender: ThreadPoolExecutor | None = None
        self._pending: list[Future] = []
        self._is_given_up = False

    def log_config(self, config: ConfigDict | dict[str, ConfigDict]) -> None:
        """Log the config, now or once the run starts. MLflow keeps the first value of each parameter."""
        flat = {_clean(name): str(value)[:LONGEST_PARAM] for name, value in flat_config(plain_config(config)).items()}
        self._unsent_params |= {name: value for name, value in flat.items() if name not in self._sent_params}
        if self._sender is not None:
            self._send_params()

    def setup(self) -> None:
        """Start the run, unless it has started already."""
        self._is_given_up = False
        self._start()

    def log_metrics(self, metrics: dict[str, Any], step: int, epoch: int, mode: str) -> None:
        """Log the numbers."""
        self._start()
        if self._sender is None:
            return
        milliseconds = int(1000 * time.time())
        numbers = {_clean(f"{mode}/{name}"): float(value) for name, value in only_numbers(metrics).items()}
        make = self._mlflow.entities.Metric
        self._send("metrics", [make(name, value, milliseconds, step) for name, value in numbers.items()])
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if future not in done]
        for future in done:
            future.result()

    def finalize(self, status: str) -> None:
        """Wait until the remaining data is sent, and end the run."""
        if self._sender is None:
            return
        done, unsent = wait(self._pending, timeout=LAST_SECONDS)
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._sender, self._pending = None, []
        self._client.set_terminated(self._run_id, STATUSES.get(status, "FAILED"))
        if unsent:
            raise TimeoutError(f"{len(unsent)} requests to {self.tracking_uri} took more than {LAST_SECONDS} seconds.")
        for future in done:
            future.result()

    def _start(self) -> None:
        if self._sender is not None or self._is_given_up:
            return
        self._is_given_up = True
        if self._run_id is None:
            self._create_run()
        else:
            self._client.update_run(self._run_id, status="RUNNING")
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlflow")
        self._is_given_up = False
        self._send_params()

    def _create_run(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        name = self.config.experiment_name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            artifacts = None if self.folder is None else (self.folder / "artifacts").as_uri()
            experiment_id = self._client.create_experiment(name, artifact_location=artifacts)
        else:
            experiment_id = experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=self.config.run_name, tags=dict(self.config.tags))
        self._run_id = run.info.run_id

    def _send_params(self) -> None:
        self._send("params", [self._mlflow.entities.Param(*param) for param in self._unsent_params.items()])
        self._sent_params |= self._unsent_params.keys()
        self._unsent_params = {}

    def _send(self, kind: str, items: list[Any]) -> None:
        assert self._sender is not None
        for start in range(0, len(items), BATCH_SIZE):
            batch = {kind: items[start : start + BATCH_SIZE]}
            self._pending.append(self._sender.submit(self._client.log_batch, self._run_id, **batch))


def _clean(name: str) -> str:
    return FORBIDDEN_IN_NAMES.sub("_", name)[:LONGEST_NAME]
