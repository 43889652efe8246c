"""Plans from the command line: of any number of devices, within a memory, as a table and as a file."""

import json
import shlex

import pytest

from xlstm_jax.cli.main import main

pytestmark = pytest.mark.slow

SMALL = (
    "model.vocab_size=512",
    "model.embedding_dim=64",
    "model.num_heads=4",
    "model.num_blocks=2",
    "data=synthetic",
    "batch_size=64",
    "context_length=64",
)


def test_a_plan_for_more_devices_than_there_are_is_printed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    file = tmp_path / "plan.json"
    options = ["--devices", "64", "--accelerator", "h100", "--no-compile", "--sharding", "--json", str(file)]
    assert main(["plan", *SMALL, "parallel=fsdp", "parallel.fsdp_min_weight_size=0", *options]) == 0
    shown = capsys.readouterr().out
    for word in ["64 × h100", "fsdp 64", "parameters", "optimizer state", "exact", "tokens a second", "lm_head"]:
        assert word in shown, word
    plan = json.loads(file.read_text())
    assert plan["num_devices"] == 64
    assert plan["persistent"]["optimizer"] == pytest.approx(2 * plan["persistent"]["parameters"], rel=0.01)


def test_a_plan_has_the_settings_that_a_run_on_these_devices_would_get(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    words = [*SMALL, "--devices", "8", "--accelerator", "h100"]
    assert main(["plan", *words]) == 0
    assert "blocks scanned" in capsys.readouterr().out
    assert main(["plan", *words, "performance=manual"]) == 0
    assert "performance: manual" in capsys.readouterr().out


def test_the_command_that_fits_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = [*SMALL, "name=my run", "--devices", "8", "--accelerator", "h100", "--target-memory", "1"]
    assert main(["plan", *words]) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("xlstm-jax train"))
    assert "trainer.gradient_accumulate_steps=" in command
    assert main(["train", *shlex.split(command)[2:], "--cfg", "job"]) == 0


def test_that_nothing_fits_has_a_code_of_its_own(capsys):
    words = [*SMALL, "--devices", "8", "--accelerator", "h100", "--target-memory", "0.0001"]
    assert main(["plan", *words]) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["model.num_blocs=1"], 2, "Did you mean 'num_blocks'?"),
        (["--accelerator", "h1000"], 2, "There is no accelerator 'h1000'"),
        (["--devices", "7", "--accelerator", "h100"], 2, "cannot be split over 7 devices"),
        (["--devices", "0"], 2, "--devices is 0, but must be at least 1."),
        (["--no-compile", "--json", "nowhere/plan.json"], 1, "nowhere/plan.json"),
    ],
)
def test_a_wrong_question_is_one_line(words, code, message, capsys):
    assert main(["plan", *SMALL, *words]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
