"""Logging of metrics and configs to TensorBoard, with tensorboardX."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigDict, flat_config
from xlstm_jax.trainer.logger.base_logger import Logger, LoggerTool, LoggerToolsConfig
from xlstm_jax.trainer.logger.values import import_extra, json_value, only_numbers, plain_config


@dataclasses.dataclass(kw_only=True, frozen=False)
class TensorBoardLoggerConfig(LoggerToolsConfig):
    """Config of the TensorBoard logger."""

    tb_flush_secs: int = 120
    """The maximum number of seconds between two flushes to disk."""
    tb_max_queue: int = 10
    """The size of the queue of values; when it is full, logging blocks."""
    tb_new_style: bool = False
    """Write scalars as tensors, as TensorFlow 2 does; TensorBoard supports both."""
    log_dir: str = "tensorboard"
    """The folder inside the folder of the run."""

    def create(self, logger: Logger) -> "TensorBoardLogger":
        """Build the tool."""
        return TensorBoardLogger(self, logger)


class TensorBoardLogger(LoggerTool):
    """Writes numbers under the tags `mode/key`, and the config as text and as hyperparameters.

    Each training run writes its own file; TensorBoard shows the files of the folder as one run.

    Args:
        config: The settings of the writer.
        logger: The logger, which has the folder of the run.
    """

    def __init__(self, config: TensorBoardLoggerConfig, logger: Logger):
        if logger.log_path is None:
            raise ValueError("The TensorBoard logger has no folder to write to: set `log_path` of the LoggerConfig.")
        self.config = config
        self.folder = Path(logger.log_path) / config.log_dir
        self._tensorboard = import_extra("tensorboardX", extra="tensorboard")
        self._logged_config: dict[str, Any] = {}
        self._purge_step: int | None = None
        self._writer: Any = None

    def log_config(self, config: ConfigDict | dict[str, ConfigDict]) -> None:
        """Write the config, merged with those that were logged before, now or once the file is open."""
        self._logged_config |= plain_config(config)
        if self._writer is not None:
            self._log_config()

    def setup(self) -> None:
        """Open the file, unless it is already open."""
        if self._writer is None:
            self._writer = self._tensorboard.SummaryWriter(
                str(self.folder),
                purge_step=self._purge_step,
                max_queue=self.config.tb_max_queue,
                flush_secs=self.config.tb_flush_secs,
                # Without this suffix, a second file within the same second would overwrite the first.
                filename_suffix=f".{time.time_ns()}",
            )
            self._purge_step = None
            if self._logged_config:
                self._log_config()

    def log_metrics(self, metrics: dict[str, Any], step: int, epoch: int, mode: str) -> None:
        """Write the numbers; other metrics are left out, as TensorBoard cannot plot them."""
        self.setup()
        for name, value in only_numbers(metrics).items():
            self._writer.file_writer.add_summary(self._scalar(f"{mode}/{name}", float(value)), step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        self.setup()
        self._writer.add_text(name, _as_code(text), step)

    def drop_after(self, step: int) -> None:
        """Start a new file that makes TensorBoard hide the later steps of earlier files."""
        self._close()
        self._purge_step = step + 1

    def finalize(self, status: str) -> None:
        """Flush the queue and close the file."""
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log_config(self) -> None:
        text = json.dumps(json_value(self._logged_config, non_finite=str), indent=2)
        self._writer.add_text("config", _as_code(text), 0)
        # TensorBoard determines the metrics itself, but only if no list of metrics is written.
        _, start, _ = self._tensorboard.summary.hparams(flat_config(self._logged_config), {})
        self._writer.file_writer.add_summary(start)

    def _scalar(self, tag: str, value: float) -> Any:
        # The writer's `add_scalar` supports one style only, and prints a line for each non-finite number.
        summary = self._tensorboard.summary
        if not self.config.tb_new_style:
            return summary.Summary(value=[summary.Summary.Value(tag=tag, simple_value=value)])
        metadata = summary.SummaryMetadata(plugin_data=summary.SummaryMetadata.PluginData(plugin_name="scalars"))
        tensor = summary.TensorProto(dtype="DT_FLOAT", float_val=[value])
        return summary.Summary(value=[summary.Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _as_code(text: str) -> str:
    """Format a text as a Markdown code block, so that it is shown verbatim."""
    return "\n".join(f"    {line}" for line in text.splitlines())
