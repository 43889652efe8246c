"""Files of metrics grow as training goes, stay readable, and have each step once."""

import csv
import dataclasses
import json
import math
import pickle
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax.core import freeze

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.trainer.logger import FileLoggerConfig, Logger, LoggerConfig

SCRIPT = """
import sys
from types import SimpleNamespace
from xlstm_jax.trainer.logger.file_logger import FileLogger, FileLoggerConfig

tool = FileLogger(FileLoggerConfig(), SimpleNamespace(log_path=sys.argv[1], monitored_names=set()))
for step in range(10**9):
    tool.log_metrics({"loss": 1 / 3}, step, 1, "train")
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
"""


@dataclasses.dataclass(kw_only=True, frozen=False)
class SomeConfig(ConfigDict):
    """A config with what JSON does not have."""

    rate: float = 1e-5
    cap: float = math.inf
    sizes: tuple[int, ...] = (1, 2)
    name: str | None = None
    kind: type = Logger
    inner: FileLoggerConfig = dataclasses.field(default_factory=FileLoggerConfig)


def make(path, **settings):
    return Logger(LoggerConfig(log_path=path, log_tools=[FileLoggerConfig(**settings)]))


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_json(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def steps_of(folder, mode="train"):
    of_csv = [int(row["log_step"]) for row in read_csv(folder / f"metrics_{mode}.csv")]
    of_json = [row["log_step"] for row in read_json(folder / f"metrics_{mode}.jsonl")]
    assert of_csv == of_json
    return of_csv


@pytest.fixture
def folder(tmp_path):
    """The folder that the tool writes to."""
    return tmp_path / "file_logs"


def test_a_row_is_in_both_files_as_soon_as_it_is_logged(tmp_path, folder):
    logger = make(tmp_path)
    logger.start_epoch(3, 0)
    for step in [1, 2]:
        logger.log_host_metrics({"loss": 0.1 * step}, step)
        rows = [{"log_step": i, "log_epoch": 3, "loss": 0.1 * i} for i in range(1, step + 1)]
        assert read_json(folder / "metrics_train.jsonl") == rows
        assert read_csv(folder / "metrics_train.csv") == [{key: str(x) for key, x in row.items()} for row in rows]


def test_each_mode_has_files_of_its_own(tmp_path, folder):
    logger = make(tmp_path, log_step_key="step", log_epoch_key="epoch")
    for mode in ["train", "val"]:
        logger.log_host_metrics({"loss": 1.0, "epoch": 7}, 5, mode=mode)
    for mode in ["train", "val"]:
        assert read_json(folder / f"metrics_{mode}.jsonl") == [{"step": 5, "epoch": 0, "loss": 1.0}]


def test_a_kill_loses_no_row_that_was_logged(tmp_path, folder):
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 50:
                process.kill()
        assert int(line) >= 50
    num_logged = int(line) + 1
    assert (folder / "metrics_train.jsonl").read_text().count("\n") >= num_logged
    assert (folder / "metrics_train.csv").read_text().count("\n") >= 1 + num_logged


def test_a_run_goes_on_in_the_same_files_and_repairs_a_torn_line(tmp_path, folder, caplog):
    make(tmp_path).log_host_metrics({"loss": 1.0}, 1, mode="train")
    for suffix, torn in {"csv": '2,0,"[1, ', "jsonl": '{"log_step": 2, "lo'}.items():
        with (folder / f"metrics_train.{suffix}").open("a") as file:
            file.write(torn)
    make(tmp_path).log_host_metrics({"loss": 2.0}, 2, mode="train")
    assert steps_of(folder) == [1, 2]
    assert sum("cut short" in message for message in caplog.messages) == 2


def test_a_second_training_run_appends(tmp_path, folder):
    logger = make(tmp_path)
    for step in [1, 2]:
        logger.on_training_start(step - 1)
        logger.log_host_metrics({"loss": 1.0}, step, mode="train")
        logger.finalize("success")
    assert steps_of(folder) == [1, 2]


def test_columns_that_come_late_leave_empty_cells_in_earlier_rows(tmp_path, folder):
    logger = make(tmp_path)
    for step, metrics in enumerate([{"a": 1}, {"a": 2, "b": 0.5}, {"c": "x,y"}, {"b": 1.5}]):
        logger.log_host_metrics(metrics, step, mode="train")
        logger = make(tmp_path) if step == 1 else logger
    assert (folder / "metrics_train.csv").read_text().splitlines() == [
        "log_step,log_epoch,a,b,c",
        "0,0,1,,",
        "1,0,2,0.5,",
        '2,0,,,"x,y"',
        "3,0,,1.5,",
    ]
    assert [set(row) for row in read_json(folder / "metrics_train.jsonl")][2] == {"log_step", "log_epoch", "c"}
    assert list(folder.glob("*.tmp")) == []


def test_steps_that_are_logged_again_after_a_resume_are_there_once(tmp_path, folder):
    logger = make(tmp_path)
    for mode in ["train", "some/task"]:
        for step in [0, 10, 20, 30]:
            logger.log_host_metrics({"loss": float(step), "values": np.arange(3)}, step, mode=mode)
    again = make(tmp_path)
    again.on_training_start(10)
    assert steps_of(folder, "some%2Ftask") == [0, 10]
    for step in [20, 30]:
        again.log_host_metrics({"loss": -1.0}, step, mode="train")
    assert steps_of(folder) == [0, 10, 20, 30]
    assert [row["loss"] for row in read_csv(folder / "metrics_train.csv")] == ["0.0", "10.0", "-1.0", "-1.0"]


def test_without_a_step_to_go_on_from_all_rows_stay(tmp_path, folder):
    make(tmp_path).log_host_metrics({"loss": 1.0}, 5, mode="train")
    make(tmp_path).on_training_start()
    assert steps_of(folder) == [5]


def test_numbers_that_are_not_finite_are_null_in_json_and_named_in_csv(tmp_path, folder):
    metrics = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.array([1.0, math.nan])}
    make(tmp_path).log_host_metrics(metrics, 1, mode="train")
    (json_row,), (csv_row,) = read_json(folder / "metrics_train.jsonl"), read_csv(folder / "metrics_train.csv")
    assert [json_row[name] for name in "abcd"] == [None, None, None, [1.0, None]]
    assert [csv_row[name] for name in "abcd"] == ["nan", "inf", "-inf", "[1.0, null]"]


def test_what_is_no_number_is_json_in_a_cell(tmp_path, folder):
    metrics = {"pair": (np.arange(2), np.ones((1, 2))), "text": "a\nb", "nothing": None, "word": "x", "yes": True}
    make(tmp_path).log_host_metrics(metrics, 1, mode="train")
    (json_row,), (csv_row,) = read_json(folder / "metrics_train.jsonl"), read_csv(folder / "metrics_train.csv")
    assert json_row["pair"] == json.loads(csv_row["pair"]) == [[0, 1], [[1.0, 1.0]]]
    assert json_row["text"] == json.loads(csv_row["text"]) == "a\nb"
    assert [csv_row[name] for name in ["nothing", "word", "yes"]] == ["", "x", "True"]


def test_odd_modes_have_safe_and_different_files(tmp_path, folder):
    modes = ["a/b", "a_b", "a%2Fb", "../up", "ä ö", "x" * 300, "x" * 301, "."]
    logger = make(tmp_path)
    for step, mode in enumerate(modes):
        logger.log_host_metrics({"loss": 1.0}, step, mode=mode)
    tables = list(folder.glob("metrics_*.csv"))
    assert len(tables) == len(modes)
    assert sorted(int(row["log_step"]) for path in tables for row in read_csv(path)) == list(range(len(modes)))
    assert {path.name for path in tmp_path.iterdir()} == {"output.log", folder.name}


@pytest.mark.parametrize(("kind", "read"), [("json", json.loads), ("yaml", yaml.safe_load), ("pickle", pickle.loads)])
def test_a_config_comes_back(tmp_path, folder, kind, read):
    logger = make(tmp_path, config_format=kind)
    logger.log_config({"first": SomeConfig()})
    logger.log_config({"second": SomeConfig(name="x")})
    (path,) = folder.iterdir()
    assert path.name == {"json": "config.json", "yaml": "config.yaml", "pickle": "config.pkl"}[kind]
    configs = read(path.read_bytes())
    assert ConfigDict.from_dict(SomeConfig, configs["first"]) == SomeConfig()
    assert ConfigDict.from_dict(SomeConfig, configs["second"]) == SomeConfig(name="x")


def test_config_json_is_the_dictionary_of_the_config(tmp_path, folder):
    config = FileLoggerConfig(log_dir="elsewhere")
    make(tmp_path).log_config(config)
    assert json.loads((folder / "config.json").read_text(), parse_constant=pytest.fail) == config.to_dict()


def test_the_documented_line_is_logged_at_the_end(tmp_path, caplog):
    make(tmp_path).finalize("success")
    assert "Finishing file logging." in caplog.messages


def test_without_a_folder_there_is_no_file_logger():
    with pytest.raises(ValueError, match="log_path"):
        make(None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"config_format": "toml"}, "json, yaml, pickle"), ({"log_epoch_key": "log_step"}, "differ")],
)
def test_settings_that_cannot_be_used_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        FileLoggerConfig(**settings)


def test_numbers_of_monitors_have_a_table_of_their_own_and_are_in_the_json_rows(tmp_path, folder):
    logger = make(tmp_path)
    logger.monitors.append(lambda row, step: {"tokens_per_second": 10.0 * step, "goodput": row["loss_mean"] / 2})
    logger.start_epoch(1, 0)
    for step in [1, 2]:
        loss = {"mean": {"value": jnp.float32(0.5), "count": jnp.float32(1)}}
        logger.log_step(freeze({"loss": loss}), step)
        logger.log_host_metrics({"lr": 0.1}, step)
    header = (folder / "metrics_train.csv").read_text().splitlines()[0]
    assert header == "log_step,log_epoch,loss_mean,epoch,step_time,lr"
    assert (folder / "system_train.csv").read_text() == (
        "log_step,log_epoch,tokens_per_second,goodput\n1,1,10.0,0.25\n2,1,20.0,0.25\n"
    )
    first = read_json(folder / "metrics_train.jsonl")[0]
    assert (first["loss_mean"], first["tokens_per_second"]) == (0.5, 10.0)
    logger.drop_after(1)
    assert (folder / "system_train.csv").read_text().count("\n") == 2


def test_rows_that_are_logged_again_replace_those_of_their_mode_and_step(tmp_path, folder):
    logger = make(tmp_path)
    for step in [1, 2]:
        for mode in ["val", "train"]:
            logger.log_host_metrics({"loss": 1.0}, step, mode=mode)
    with logger.logs_again(2):
        for name in ["loss", "accuracy"]:
            logger.log_host_metrics({name: 3.0}, 2, mode="val")
    assert steps_of(folder) == [1, 2]
    assert [row.get("loss") for row in read_json(folder / "metrics_val.jsonl")] == [1.0, 3.0, None]
    logger.log_host_metrics({"loss": 4.0}, 2, mode="val")
    assert steps_of(folder, "val") == [1, 2, 2, 2]
