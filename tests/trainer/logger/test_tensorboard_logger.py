"""TensorBoard finds the numbers under their tags, and the config."""

import json
import math
import struct

import numpy as np
import pytest

from xlstm_jax.trainer.logger import Logger, LoggerConfig, TensorBoardLoggerConfig

pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData


def make(path, **settings):
    return Logger(LoggerConfig(log_path=path, log_tools=[TensorBoardLoggerConfig(**settings)]))


def read(path):
    """All events of a folder, file by file in the order of their names, as TensorBoard reads them."""
    events = []
    for file in sorted((path / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def values_of(path):
    return [(event.step, value) for event in read(path) for value in event.summary.value]


def scalars_of(path):
    return [(step, value.tag, value.simple_value) for step, value in values_of(path) if value.HasField("simple_value")]


def test_numbers_have_the_tags_of_their_mode(tmp_path):
    logger = make(tmp_path)
    logger.on_training_start()
    logger.log_host_metrics({"loss": 0.5, "text": "x", "values": np.ones(3)}, 2, mode="train")
    logger.log_host_metrics({"optimizer/lr": 2, "loss": math.inf}, 2, mode="val")
    logger.finalize("success")
    assert scalars_of(tmp_path) == [(2, "train/loss", 0.5), (2, "val/optimizer/lr", 2.0), (2, "val/loss", math.inf)]


def test_scalars_of_the_new_style_are_tensors(tmp_path):
    logger = make(tmp_path, tb_new_style=True)
    logger.log_host_metrics({"loss": 0.5}, 2, mode="train")
    logger.finalize("success")
    ((step, value),) = values_of(tmp_path)
    assert (step, value.tag, list(value.tensor.float_val)) == (2, "train/loss", [0.5])
    assert value.metadata.plugin_data.plugin_name == "scalars"


def test_runs_one_after_the_other_keep_their_rows_with_or_without_a_start(tmp_path):
    logger = make(tmp_path)
    logger.log_host_metrics({"loss": 1.0}, 1, mode="train")
    logger.finalize("error")
    for step in [2, 3]:
        logger.on_training_start()
        logger.log_host_metrics({"loss": 1.0}, step, mode="train")
        logger.finalize("success")
    assert [step for step, *_ in scalars_of(tmp_path)] == [1, 2, 3]


def test_later_steps_are_hidden_after_a_resume(tmp_path):
    logger = make(tmp_path)
    logger.log_host_metrics({"loss": 1.0}, 30, mode="train")
    logger.on_training_start(20)
    logger.log_host_metrics({"loss": 2.0}, 21, mode="train")
    logger.finalize("success")
    logger.log_host_metrics({"loss": 2.0}, 21, mode="test")
    logger.finalize("success")
    events = read(tmp_path)
    (start,) = (i for i, event in enumerate(events) if event.session_log.status == SessionLog.START)
    assert events[start].step == 21
    assert [event.step for event in events[:start] if event.summary.value] == [30]
    assert [event.step for event in events[start:] if event.summary.value] == [21, 21]


def test_the_config_is_text_and_hyperparameters(tmp_path):
    logger = make(tmp_path)
    logger.log_config({"logger": logger.config})
    assert not (tmp_path / "tensorboard").exists()
    logger.on_training_start()
    logger.finalize("success")
    text, hparams = (value for _, value in values_of(tmp_path))
    assert json.loads(text.tensor.string_val[0])["logger"]["log_every_n_steps"] == 1
    start = HParamsPluginData.FromString(hparams.metadata.plugin_data.content).session_start_info
    assert start.hparams["logger.log_every_n_steps"].number_value == 1
    assert start.hparams["logger.log_tools.0.log_dir"].string_value == "tensorboard"


def test_the_settings_reach_the_writer(tmp_path):
    logger = make(tmp_path, tb_flush_secs=7, tb_max_queue=3)
    logger.on_training_start()
    writer = logger.log_tools[0]._writer
    assert (writer._flush_secs, writer._max_queue) == (7, 3)
    logger.finalize("success")


def test_without_a_folder_there_is_no_tensorboard_logger():
    with pytest.raises(ValueError, match="log_path"):
        make(None)
