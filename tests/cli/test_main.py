"""The command line answers at once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xlstm_jax.cli.main import COMMANDS, main
from xlstm_jax.version import __version__


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_an_option_is_answered_within_a_second_and_without_jax(option):
    code = (
        "import sys, xlstm_jax.cli.main as cli\n"
        f"try: cli.main(['{option}'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'jax', 'numpy', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"xlstm-jax {__version__}\n"


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert COMMANDS[command] in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("argv", [[], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_a_wrong_call_is_a_usage_error(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert "usage: xlstm-jax" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_shows_the_usage_of_the_command(command, capsys):
    given = {"report": ["run"], "resume": ["run"], "generate": ["run"], "checkpoints": ["run"]}.get(command, [])
    given = ["texts", "--output", "shards"] if command == "prepare" else given
    with pytest.raises(SystemExit) as stop:
        main([command, *given, "--no-such-option"])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: xlstm-jax {command} ")
    assert shown.endswith("unrecognized arguments: --no-such-option\n")


def test_only_the_run_is_required_to_resume(capsys):
    with pytest.raises(SystemExit):
        main(["resume"])
    assert capsys.readouterr().err.endswith("the following arguments are required: RUN\n")


def test_a_command_that_is_stopped_has_the_code_of_its_signal_and_no_traceback(capsys, monkeypatch, tmp_path):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("xlstm_jax.cli.generate.continue_texts", stop)
    (tmp_path / "config.yaml").touch()
    assert main(["generate", str(tmp_path), "--prompt", "a text"]) == 130
    assert capsys.readouterr().err == "Stopped.\n"


@pytest.mark.parametrize("argv", [["--help"], ["train", "--cfg", "job"], ["bench", "--list"]])
def test_a_command_that_nobody_reads_leaves_without_a_word(argv):
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "xlstm_jax.cli.main", *argv],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": ""},  # argparse would not notice
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, b"")
