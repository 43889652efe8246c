"""Logging of metrics and configs to files in the folder of the run.

`log_metrics` returns once a row is in both files of its mode, so a run that is killed loses at most the row that it was
writing.
"""

import dataclasses
import hashlib
import json
import logging
import pickle
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerTool, LoggerToolsConfig
from xlstm_jax.trainer.logger.tables import CsvTable, JsonLines
from xlstm_jax.trainer.logger.values import json_value, plain_config
from xlstm_jax.utils.files import write_atomically

LOGGER = logging.getLogger(__name__)

CONFIG_FILES = {"json": "config.json", "yaml": "config.yaml", "pickle": "config.pkl"}
LONGEST_NAME = 200


@dataclasses.dataclass(kw_only=True, frozen=False)
class FileLoggerConfig(LoggerToolsConfig):
    """Config of the file logger."""

    log_step_key: str = "log_step"
    """The column of the step."""
    log_epoch_key: str = "log_epoch"
    """The column of the epoch."""
    config_format: str = "json"
    """`json`, `yaml` or `pickle`."""
    log_dir: str = "file_logs"
    """The folder inside the folder of the run."""

    def __post_init__(self):
        if self.config_format not in CONFIG_FILES:
            raise ConfigError(f"config_format is {self.config_format!r}: choose from {', '.join(CONFIG_FILES)}.")
        if self.log_step_key == self.log_epoch_key:
            raise ConfigError(f"log_step_key and log_epoch_key are both {self.log_step_key!r}: they have to differ.")

    def create(self, logger: Logger) -> "FileLogger":
        """Build the tool."""
        return FileLogger(self, logger)


class FileLogger(LoggerTool):
    """Appends each row to `metrics_<mode>.csv` and to `metrics_<mode>.jsonl`, and writes the config.

    The numbers that the logger's monitors add to a row, such as throughput, memory and goodput, have a CSV file of
    their own, `system_<mode>.csv`; the JSON line has all of them.

    A run that resumes in the same folder appends to the same files. Characters of a mode that are not allowed in file
    names are percent-encoded, as in `metrics_a%2Fb.csv`. For the format of values see `tables.CsvTable` and
    `tables.JsonLines`. In a config, non-finite numbers are strings, which `ConfigDict.from_dict` parses.

    Args:
        config: The names of columns and files.
        logger: The logger, which has the folder of the run.
    """

    def __init__(self, config: FileLoggerConfig, logger: Logger):
        if logger.log_path is None:
            raise ValueError("The file logger has no folder to write to: set `log_path` of the LoggerConfig.")
        self.config = config
        self.folder = Path(logger.log_path) / config.log_dir
        self._logged_config: dict[str, Any] = {}
        self._logger = logger
        self._tables: dict[str, _Tables] = {}

    def log_config(self, config: ConfigDict | dict[str, ConfigDict]) -> None:
        """Write the config, merged with those that were logged before."""
        self._logged_config |= plain_config(config)
        kind = self.config.config_format
        write_atomically(self.folder / CONFIG_FILES[kind], [_serialize(self._logged_config, kind)])

    def log_metrics(self, metrics: dict[str, Any], step: int, epoch: int, mode: str) -> None:
        """Append a row."""
        place = {self.config.log_step_key: step, self.config.log_epoch_key: epoch}
        row = place | metrics | place
        names = self._logger.monitored_names - place.keys()
        tables = self._tables_of(mode)
        tables.lines.append(row)
        tables.metrics.append({name: value for name, value in row.items() if name not in names})
        if names & row.keys():
            tables.system.append({name: value for name, value in row.items() if name in names | place.keys()})

    def drop_after(self, step: int) -> None:
        """Remove the rows of later steps from the files of all modes, including modes that this run has not logged.

        If that would remove all steps, as when training restarts, the files are moved to `replaced_<number>` instead.
        """
        key, tables = self.config.log_step_key, [_open_table(path) for path in self._files()]
        if step == 0 and any(table.has_after(key, 0) for table in tables):
            self._move_away([table.path for table in tables])
            return
        for table in tables:
            table.drop_after(key, step)

    def drop_step(self, step: int, mode: str) -> None:
        """Remove the rows of a step and of later steps from the files of a mode."""
        for table in self._tables_of(mode):
            if table.path.exists():
                table.drop_after(self.config.log_step_key, step - 1)

    def _tables_of(self, mode: str) -> "_Tables":
        if mode not in self._tables:
            self.folder.mkdir(parents=True, exist_ok=True)
            name = _file_name(mode)
            self._tables[mode] = _Tables(
                JsonLines(self.folder / f"metrics_{name}.jsonl"),
                CsvTable(self.folder / f"metrics_{name}.csv"),
                CsvTable(self.folder / f"system_{name}.csv"),
            )
        return self._tables[mode]

    def _files(self) -> list[Path]:
        patterns = "metrics_*.jsonl", "metrics_*.csv", "system_*.csv"
        return sorted(path for pattern in patterns for path in self.folder.glob(pattern))

    def _move_away(self, paths: Sequence[Path]) -> None:
        number = 1
        while (target := self.folder / f"replaced_{number}").exists():
            number += 1
        target.mkdir()
        for path in paths:
            path.replace(target / path.name)
        self._tables.clear()
        LOGGER.warning("Training starts from step 0: the metrics of an earlier start were moved to %s.", target)

    def finalize(self, status: str) -> None:
        """Log that all files are written."""
        LOGGER.info("Finishing file logging.")


class _Tables(NamedTuple):
    """The files of a mode."""

    lines: JsonLines
    metrics: CsvTable
    system: CsvTable


def _open_table(path: Path) -> JsonLines | CsvTable:
    return CsvTable(path) if path.suffix == ".csv" else JsonLines(path)


def _file_name(mode: str) -> str:
    name = urllib.parse.quote(mode, safe="")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(mode.encode()).hexdigest()[:16]}"


def _serialize(config: dict[str, Any], kind: str) -> bytes:
    if kind == "pickle":
        return pickle.dumps(config)
    plain = json_value(config, non_finite=str)
    text = json.dumps(plain, indent=2) + "\n" if kind == "json" else yaml.safe_dump(plain, sort_keys=False)
    return text.encode()
