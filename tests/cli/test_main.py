"""The command line answers at once, and `doctor` tells health from illness."""

import subprocess
import sys
import time

import jax
import pytest
from packaging.requirements import Requirement

from xlstm_jax import __version__
from xlstm_jax.cli import doctor
from xlstm_jax.cli.main import COMMANDS, main


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


def test_doctor_finds_this_machine_healthy(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SLURM_JOB_ID", "421")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ["jaxlib", jax.__version__, "flax", "grain", "hydra-core", "orbax-checkpoint", "421", "XLA_FLAGS"]:
        assert word in shown
    assert sum(line.split()[-1:] == ["s"] for line in shown.splitlines()) == jax.local_device_count()


def test_doctor_reports_a_device_that_computes_wrong(capsys, monkeypatch):
    monkeypatch.setattr(jax, "jit", lambda f: lambda a, b: f(a, b) + 1)
    assert main(["doctor"]) == 1
    assert "the product is wrong" in capsys.readouterr().out


def test_doctor_reports_that_jax_does_not_start(capsys, monkeypatch):
    def fail():
        raise RuntimeError("no backend")

    monkeypatch.setattr(jax, "local_devices", fail)
    assert main(["doctor"]) == 1
    assert "no backend" in capsys.readouterr().out


def test_doctor_reports_a_core_package_that_is_missing_or_too_old(capsys, monkeypatch):
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["no-such-package>=2", "jax<0.1", "flax>=0.1"])
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "no-such-package>=2 is needed; found: none" in shown
    assert f"jax<0.1 is needed; found: {jax.__version__}" in shown
    assert "flax>=0.1 is needed" not in shown


def test_doctor_survives_that_nothing_is_installed(capsys, monkeypatch):
    def not_found(name):
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", not_found)
    assert main(["doctor"]) == 1
    assert "xlstm_jax is needed; found: none" in capsys.readouterr().out


def test_packages_of_an_extra_are_those_it_adds_with_their_own_extras(monkeypatch):
    requires = {
        "xlstm_jax": ["jax>=0.4", 'jax[fast]; extra == "gpu"', 'flax; extra == "other"', 'numpy; python_version < "3"'],
        "jax": ["numpy", 'optax>=99; extra == "fast"'],
    }
    monkeypatch.setattr(doctor.metadata, "requires", requires.get)
    assert [str(package.required) for package in doctor.packages("xlstm_jax")] == ["jax>=0.4"]
    added = list(doctor.packages("xlstm_jax", "gpu"))
    assert [package.required.name for package in added] == ["jax", "optax"]
    assert [package.healthy for package in added] == [True, False]


def test_a_package_is_healthy_only_in_a_version_that_was_asked_for():
    required = Requirement("jax>=0.10")
    healthy = {version: doctor.Package(required, version).healthy for version in [None, "0.9", "0.10.0rc1", "0.12.1"]}
    assert healthy == {None: False, "0.9": False, "0.10.0rc1": False, "0.12.1": True}
