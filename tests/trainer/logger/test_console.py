"""The console shows plain lines in a file and one live line in a terminal."""

import io
import logging
import re
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from xlstm_jax.trainer.logger import ConsoleLoggerConfig, Logger, LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLogger

ROW = {
    "loss_mean": 3.2136,
    "perplexity": 24.868,
    "tokens_per_second": 12345.6,
    "mfu": 0.412,
    "device_memory_gib": 3.21,
    "step_time": 0.5,
    "grad_norm": 7.0,
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def make(terminal=None, width=150):
    """A logger with a console that has a run of 1000 steps before it."""
    logger = Logger(LoggerConfig())
    if terminal is None:
        logger.log_tools = [ConsoleLoggerConfig().create(logger)]
    else:
        console = Console(file=terminal, force_terminal=True, width=width, color_system=None)
        logger.log_tools = [ConsoleLogger(ConsoleLoggerConfig(), logger, console)]
    logger.on_training_start()
    logger.log_host_metrics({"num_train_steps": 1000, "global_batch_size": 8}, 0, mode="dataset")
    return logger


def screen(terminal):
    """What the lines of a terminal show in the end: each is erased from its start before it is drawn again."""
    return [CONTROL.sub("", line.rpartition("\r\x1b[2K")[2]) for line in terminal.getvalue().split("\n")]


def lines_of(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("[")]


def test_a_row_of_training_is_a_plain_line(capsys):
    make().log_host_metrics(ROW, 200, mode="train")
    assert lines_of(capsys) == [
        "step 200/1000 (20 %)  loss 3.214  perplexity 24.87  tokens/s 12.3k  MFU 41 %  memory 3.2 GiB  ETA 0:06:40"
    ]


def test_a_narrow_terminal_shows_only_metrics_that_fit_as_a_whole():
    terminal = io.StringIO()
    make(terminal, width=80).log_host_metrics(ROW, 200, mode="train")
    shown = screen(terminal)[-1]
    assert shown.rstrip().endswith("ETA 0:06:40  loss 3.214  perplexity 24.87")
    assert len(shown) <= 80


def test_a_terminal_breaks_messages_between_words():
    terminal = io.StringIO()
    logger = make(terminal, width=80)
    logger.log_host_metrics(dict.fromkeys(map("number_{}".format, range(8)), 12345.678), 200, mode="val")
    lines = screen(terminal)
    assert max(map(len, lines)) <= 80
    assert sum(line.split().count("12346") for line in lines) == 8


@pytest.mark.parametrize("postfix", ["", "_mean", "_single"])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", float("nan"), "loss nan"),
        ("perplexity", 50257.3, "perplexity 50257"),
        ("bits_per_byte", 0.91, "bits per byte 0.9100"),
        ("tokens_per_second", 2.5e6, "tokens/s 2.5M"),
        ("tokens_per_second", 999.4, "tokens/s 999"),
        ("mfu", 0.0123, "MFU 1.2 %"),
        ("mfu_6n", 0.34, "6N-MFU 34 %"),
        ("device_memory_gib", 79.96, "memory 80.0 GiB"),
        ("checkpoint_time", 12.34, "checkpoint 12.3 s"),
        ("evaluation_time", 3.0, "evaluation 3.0 s"),
    ],
)
def test_any_metric_may_come_alone_and_with_a_postfix(capsys, name, value, text, postfix):
    make().log_host_metrics({name + postfix: value}, 5, mode="train")
    assert lines_of(capsys) == [f"step 5/1000 (0.5 %)  {text}"]


def test_rows_without_a_pause_do_not_mention_it(capsys):
    make().log_host_metrics({"loss": 1.0, "checkpoint_time": 0.0, "evaluation_time": 0.05}, 5, mode="train")
    assert lines_of(capsys) == ["step 5/1000 (0.5 %)  loss 1.000"]


def test_the_phases_of_a_start_are_a_line(capsys):
    metrics = {"startup_imports": 2.0, "startup_seconds": 2.0, "num_programs": 1, "compile_seconds": 1.0}
    make().log_host_metrics(metrics, 1, mode="startup")
    assert lines_of(capsys) == ["startup 2.0 s: imports 2.0 (1 programs compiled in 1.0 s, no compilation cache)"]


def test_without_a_number_of_steps_there_is_no_end_in_sight(capsys):
    logger = make()
    logger.on_training_start()
    logger.log_host_metrics({"loss": 1.0, "step_time": 0.5}, 5, mode="train")
    assert lines_of(capsys) == ["step 5  loss 1.000"]


def test_the_last_known_time_of_a_step_serves_for_rows_without_one(capsys):
    logger = make()
    logger.log_host_metrics({"loss": 1.0, "step_time": 0.5}, 500, mode="train")
    logger.log_host_metrics({"loss": 1.0}, 800, mode="train")
    assert lines_of(capsys)[1] == "step 800/1000 (80 %)  loss 1.000  ETA 0:01:40"


def test_an_evaluation_is_a_line_with_its_results(capsys):
    logger = make()
    logger.log_host_metrics({"loss": 3.0, "perplexity": 20.1, "epoch_time": 12.2}, 200, mode="val")
    logger.log_host_metrics({"acc": 0.25, "num": 40, "name": "x"}, 200, mode="some/task")
    logger.log_host_metrics({f"m{i}": i for i in range(20)}, 200, mode="test")
    assert lines_of(capsys) == [
        "val at step 200  loss 3.000  perplexity 20.10  in 0:00:12",
        "some/task at step 200  acc 0.2500  num 40",
        "test at step 200  m0 0  m1 1  m2 2  m3 3  m4 4  m5 5  m6 6  m7 7",
    ]


def test_rows_with_nothing_to_show_are_passed_over(capsys):
    logger = make()
    logger.log_host_metrics({"optimizer/lr": 0.1}, 1, mode="train")
    logger.log_host_metrics({"epoch_time": 3.0}, 1, mode="train")
    logger.log_host_metrics({"epoch_time": 3.0}, 1, mode="val")
    logger.log_host_metrics({"num_params": 3}, 1, mode="model")
    assert lines_of(capsys) == []


def test_a_terminal_has_one_line_that_is_drawn_again():
    terminal = io.StringIO()
    logger = make(terminal)
    for step in [200, 400]:
        logger.log_host_metrics(ROW, step, mode="train")
    (line,) = screen(terminal)
    assert line.startswith("━━━━")
    assert "step 400/1000 (40 %)  ETA 0:05:00  loss 3.214  perplexity 24.87" in line
    logger.finalize("success")
    *_, last, after = screen(terminal)
    assert (last, after) == (line, "")


def test_messages_and_results_stand_above_the_line():
    terminal = io.StringIO()
    logger = make(terminal)
    logger.log_host_metrics(ROW, 200, mode="train")
    logging.getLogger("xlstm_jax.somewhere").warning("A message.")
    logger.log_host_metrics({"loss": 3.0}, 200, mode="val")
    message, result, line = screen(terminal)
    logger.finalize("success")
    assert message.endswith("- A message.")
    assert result == "val at step 200  loss 3.000"
    assert "step 200/1000" in line


def test_the_cursor_stays_visible_so_that_a_kill_leaves_it_so():
    terminal = io.StringIO()
    logger = make(terminal)
    logger.log_host_metrics(ROW, 200, mode="train")
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")
    logger.finalize("success")


def test_the_terminal_is_given_back():
    terminal = io.StringIO()
    before = (sys.stdout, sys.stderr)
    logger = make(terminal)
    for _ in range(2):
        logger.log_host_metrics(ROW, 200, mode="train")
        assert (sys.stdout, sys.stderr) != before
        logger.finalize("error")
        assert (sys.stdout, sys.stderr) == before
    assert sum("step 200/1000" in line for line in screen(terminal)) == 2


def test_no_thread_draws_the_line():
    logger = make(io.StringIO())
    before = threading.active_count()
    logger.log_host_metrics(ROW, 200, mode="train")
    assert threading.active_count() == before
    logger.finalize("success")


def test_an_exception_that_nobody_catches_leaves_the_terminal_whole():
    code = """
from types import SimpleNamespace
from xlstm_jax.trainer.logger.console import ConsoleLogger, ConsoleLoggerConfig

tool = ConsoleLogger(ConsoleLoggerConfig(live=True), SimpleNamespace())
tool.log_metrics({"loss": 1.0}, 5, 1, "train")
raise RuntimeError("It broke.")
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert "RuntimeError: It broke." in process.stdout + process.stderr
    assert process.stdout.endswith("\x1b[?25h")
    assert "step 5" in process.stdout.splitlines()[-2]


@pytest.mark.parametrize(("live", "expected"), [(True, True), (False, False), (None, False)])
def test_a_live_line_can_be_asked_for(live, expected):
    logger = Logger(LoggerConfig(log_tools=[ConsoleLoggerConfig(live=live)]))
    assert logger.log_tools[0].is_live == expected


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = io.StringIO()
    make(terminal).log_host_metrics(ROW, 200, mode="train")
    assert terminal.getvalue().startswith("step 200/1000")
    assert not CONTROL.search(terminal.getvalue())


def test_bits_per_byte_of_an_evaluation_stand_beside_what_is_to_beat(capsys):
    logger = Logger(LoggerConfig())
    logger.log_tools = [ConsoleLoggerConfig(references={"gzip": 2.114, "xz": 1.5}).create(logger)]
    logger.log_host_metrics({"loss": 1.0, "bits_per_byte": 1.4427}, 5, mode="val")
    (line,) = lines_of(capsys)
    assert "bits per byte 1.443 · gzip 2.114 · xz 1.500" in line


def test_the_first_lines_of_a_text_are_shown(capsys):
    logger = make()
    logger.log_text("'def' continued", "\n".join(f"line {n}" for n in range(12)), 30)
    lines = lines_of(capsys)
    assert lines[0] == "  'def' continued at step 30"
    assert lines[1:3] == ["  │ line 0", "  │ line 1"]
    assert lines[-1] == "  │ …"
    assert len(lines) == 10
