"""Messages go to stdout and a file, and nothing that belongs to others is touched."""

import logging
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.live import Live

from xlstm_jax.trainer.logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.cmd_logging import (
    get_loglevel,
    setup_exception_logging,
    setup_logging,
    setup_logging_multiprocess,
)

LOGGER = logging.getLogger("xlstm_jax.some.module")
TIME = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\]"


def test_a_line_has_the_documented_format(tmp_path, capsys):
    setup_logging_multiprocess(str(tmp_path / "output.log"))
    LOGGER.info("A message.")
    line = (tmp_path / "output.log").read_text()
    assert re.fullmatch(TIME + r"\[xlstm_jax\.some\.module:\d+\]\[INFO\]\[R0\] - A message\.\n", line)
    assert capsys.readouterr().out == line


def test_messages_below_a_level_are_in_the_file_only(tmp_path, capsys):
    Logger(LoggerConfig(log_path=tmp_path, print_level="WARNING"))
    LOGGER.info("Quiet.")
    LOGGER.warning("Loud.")
    written, shown = (tmp_path / "output.log").read_text(), capsys.readouterr().out
    assert ("Quiet." in written, "Loud." in written) == (True, True)
    assert ("Quiet." in shown, "Loud." in shown) == (False, True)
    with pytest.raises(ValueError, match="print_level is 'LOUD'"):
        LoggerConfig(print_level="LOUD")


def test_a_single_process_has_no_rank(tmp_path):
    setup_logging(str(tmp_path / "output.log"))
    LOGGER.info("A message.")
    assert "[INFO] - A message." in (tmp_path / "output.log").read_text()


def test_other_processes_report_errors_only(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 3)
    setup_logging_multiprocess(str(tmp_path / "output.log"))
    LOGGER.warning("A warning.")
    LOGGER.error("An error.")
    (line,) = (tmp_path / "output.log").read_text().splitlines()
    assert line.endswith("[ERROR][R3] - An error.")


def test_a_second_setup_replaces_the_first(tmp_path, capsys):
    for name in ["first.log", "second.log", "second.log"]:
        setup_logging(str(tmp_path / name))
    LOGGER.info("A message.")
    assert (tmp_path / "first.log").read_text() == ""
    assert len((tmp_path / "second.log").read_text().splitlines()) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_file_is_appended_to(tmp_path):
    (tmp_path / "output.log").write_text("Before.\n")
    setup_logging(str(tmp_path / "output.log"))
    LOGGER.info("A message.")
    assert len((tmp_path / "output.log").read_text().splitlines()) == 2


def test_handlers_of_users_stay(tmp_path, package_logger):
    handler = logging.NullHandler()
    package_logger.addHandler(handler)
    setup_logging(str(tmp_path / "output.log"))
    setup_logging(None)
    assert handler in package_logger.handlers


def test_a_root_logger_that_prints_is_not_repeated(tmp_path, capsys, monkeypatch):
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stdout)
    monkeypatch.setattr(root, "handlers", [handler])
    setup_logging(str(tmp_path / "output.log"))
    LOGGER.info("A message.")
    assert capsys.readouterr().out == "A message.\n"
    assert "A message." in (tmp_path / "output.log").read_text()


def test_a_root_logger_that_prints_is_not_repeated_beside_a_live_line(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler(sys.stdout)])
    setup_logging(None)
    with Live(console=Console(force_terminal=True), auto_refresh=False):
        LOGGER.info("A message.")
    assert capsys.readouterr().out.count("A message.") == 1


def test_handlers_that_a_root_logger_gets_later_print_nothing_of_ours(tmp_path, capsys, monkeypatch, package_logger):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(package_logger, "propagate", True)
    setup_logging(tmp_path / "output.log")
    logging.basicConfig()  # as absl does
    package_logger.info("once")
    captured = capsys.readouterr()
    assert (captured.out.count("once"), captured.err.count("once")) == (1, 0)


def test_the_root_logger_and_the_hook_for_exceptions_stay_as_they_are(tmp_path):
    root = logging.getLogger()
    before = (root.handlers[:], root.level, root.disabled, sys.excepthook)
    setup_logging(str(tmp_path / "output.log"))
    logger = Logger(LoggerConfig(log_path=tmp_path))
    logger.on_training_start()
    logger.finalize("success")
    assert (root.handlers, root.level, root.disabled, sys.excepthook) == before


def test_messages_of_others_stay_out_of_the_file(tmp_path):
    setup_logging(str(tmp_path / "output.log"))
    logging.getLogger("other.package").error("A message.")
    assert (tmp_path / "output.log").read_text() == ""


@pytest.mark.parametrize(("value", "level"), [("debug", "DEBUG"), ("WARNING", "WARNING")])
def test_the_level_comes_from_the_environment(tmp_path, monkeypatch, package_logger, value, level):
    monkeypatch.setenv("LOGLEVEL", value)
    setup_logging(str(tmp_path / "output.log"))
    assert get_loglevel() == level
    assert package_logger.level == getattr(logging, level)


def test_the_level_is_info_by_default():
    assert get_loglevel() == "INFO"


def test_an_unknown_level_is_refused(monkeypatch):
    monkeypatch.setenv("LOGLEVEL", "loud")
    with pytest.raises(ValueError, match="DEBUG, INFO"):
        get_loglevel()


def test_exceptions_are_logged_once_and_handed_on_if_asked_for(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    setup_logging(str(tmp_path / "output.log"))
    setup_exception_logging()
    setup_exception_logging()
    error = RuntimeError("It broke.")
    sys.excepthook(RuntimeError, error, None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    text = (tmp_path / "output.log").read_text()
    assert text.count("Uncaught exception") == 1
    assert "RuntimeError: It broke." in text
    assert [args[0] for args in seen] == [RuntimeError, KeyboardInterrupt]


def test_importing_the_package_sets_nothing_up():
    code = """
import logging, sys
import xlstm_jax.trainer.logger
assert logging.getLogger().handlers == []
assert logging.getLogger("xlstm_jax").handlers == []
assert sys.excepthook is sys.__excepthook__
assert not {"grain", "hydra", "orbax", "pandas", "wandb"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
