"""`doctor` tells health from illness, and no illness keeps it from its report."""

import json
import os
from collections import namedtuple
from pathlib import Path

import jax
import numpy as np
import pytest
from packaging.requirements import Requirement

from xlstm_jax.cli.checks import devices, disk, self_tests, software
from xlstm_jax.cli.checks.kernels import KERNELS
from xlstm_jax.cli.main import main
from xlstm_jax.kernels.mlstm import api as mlstm_api
from xlstm_jax.kernels.slstm import api as slstm_api

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def wide_and_elsewhere(monkeypatch, tmp_path):
    """Keep lines whole, and the disk that is checked away from the sources."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


def doctor(*arguments):
    return main(["doctor", *map(str, arguments)])


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """One complete examination: its exit code and its sections by title."""
    folder = tmp_path_factory.mktemp("complete")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "421")
        exit_code = doctor("--path", folder, "--json", folder.with_suffix(".json"))
    assert list(folder.iterdir()) == []
    found = json.loads(folder.with_suffix(".json").read_text())
    assert found["healthy"] is (exit_code == 0)
    return exit_code, {section["title"]: section for section in found["sections"]}


def test_doctor_finds_this_machine_healthy_in_all_that_it_checks(complete):
    exit_code, sections = complete
    assert [problem for section in sections.values() for problem in section["problems"]] == []
    assert exit_code == 0
    versions = {row["package"]: row["version"] for row in sections["Software"]["rows"]}
    assert versions["jax"] == jax.__version__
    assert {"jaxlib", "flax", "grain", "hydra-core", "orbax-checkpoint"} <= set(versions)
    variables = {row["variable"]: row["value"] for row in sections["Environment"]["rows"]}
    assert variables["SLURM_JOB_ID"] == "421"
    assert "XLA_FLAGS" in variables
    assert [row["device"] for row in sections["Devices"]["rows"]] == [str(device) for device in jax.local_devices()]
    assert list(sections) == [
        "Software",
        "Environment",
        "Devices",
        "Kernels",
        "Self-tests of kernels",
        "Collectives",
        "Disk",
        "Extras",
    ]


def test_every_backend_that_runs_is_tested_on_one_device_of_a_kind(complete):
    rows = complete[1]["Self-tests of kernels"]["rows"]
    backends = [
        (kernel.name, backend)
        for kernel in KERNELS
        for backend in kernel.backends
        if backend not in ("cudnn", "mosaic")
    ]
    assert [(row["kernel"], row["backend"]) for row in rows] == backends
    assert {row["device"] for row in rows} == {str(jax.local_devices()[0])}


def test_no_error_of_a_self_test_comes_near_the_limit(complete):
    for row in complete[1]["Self-tests of kernels"]["rows"]:
        assert float(row["largest relative error"].removeprefix("✓ ")) < float(row["limit"]) / 5


def test_doctor_says_which_kernels_run_why_others_do_not_and_what_auto_picks(complete):
    found = {(row["kernel"], row["backend"]): row["runs here"] for row in complete[1]["Kernels"]["rows"]}
    assert {kernel for kernel, _ in found} == {"mLSTM", "sLSTM", "attention"}
    assert {names for names, state in found.items() if state == "✓"} == {
        ("mLSTM", "reference"),
        ("mLSTM", "parallel"),
        ("mLSTM", "chunkwise"),
        ("sLSTM", "reference"),
        ("sLSTM", "recompute"),
        ("attention", "xla"),
    }
    assert found["attention", "cudnn"].startswith("no: The attention backend 'cudnn' needs a GPU")
    assert found["mLSTM", "auto"].startswith("chunkwise: the chunkwise form in plain JAX")
    assert found["sLSTM", "auto"].startswith("recompute: a scan that keeps only hidden states")
    assert found["attention", "auto"].startswith("xla: XLA, for cuDNN needs")


def test_a_quick_check_leaves_out_self_tests_and_the_speed_of_disks(capsys):
    assert doctor("--quick") == 0
    shown = capsys.readouterr().out
    assert "Kernels" in shown
    assert "Self-tests" not in shown
    assert "atomic rename" in shown
    assert "MiB/s" not in shown


def test_json_that_cannot_be_written_is_a_problem_and_no_crash(capsys, tmp_path):
    assert doctor("--quick", "--json", tmp_path / "missing" / "found.json") == 1
    assert "The results cannot be written: FileNotFoundError" in capsys.readouterr().out


def test_a_device_that_computes_wrong_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(devices.jax, "jit", lambda f, **_: lambda *x: f(*x) + 1)
    section = devices.check_devices("Devices")
    assert len(section.problems) == jax.local_device_count()
    assert all("the product is wrong" in problem for problem in section.problems)


def test_doctor_reports_that_jax_does_not_start_and_goes_on(capsys, monkeypatch):
    def fail():
        raise RuntimeError("no backend\nand a long story")

    monkeypatch.setattr(jax, "local_devices", fail)
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "JAX does not start: RuntimeError: no backend\n" in shown
    assert "Collectives" not in shown
    assert "atomic rename" in shown


def test_doctor_survives_a_check_that_crashes(capsys, monkeypatch):
    def crash(_):
        raise KeyError("no such thing")

    monkeypatch.setattr(software, "check_extras", crash)
    assert doctor("--quick") == 1
    assert "Extras: KeyError: 'no such thing'" in capsys.readouterr().out


def test_doctor_reports_a_core_package_that_is_missing_or_too_old(capsys, monkeypatch):
    monkeypatch.setattr(software.metadata, "requires", lambda _: ["no-such-package>=2", "jax<0.1", "flax>=0.1"])
    assert doctor("--quick") == 1
    shown = capsys.readouterr().out
    assert "no-such-package>=2 is required; installed: none" in shown
    assert f"jax<0.1 is required; installed: {jax.__version__}" in shown
    assert "flax>=0.1 is needed" not in shown


def test_doctor_survives_that_nothing_is_installed(capsys, monkeypatch):
    def not_found(name):
        raise software.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.metadata, "version", not_found)
    assert doctor("--quick") == 1
    assert "xlstm_jax is required; installed: none" in capsys.readouterr().out


def test_packages_of_an_extra_are_those_it_adds_with_their_own_extras(monkeypatch):
    requires = {
        "xlstm_jax": ["jax>=0.4", 'jax[fast]; extra == "gpu"', 'flax; extra == "other"', 'numpy; python_version < "3"'],
        "jax": ["numpy", 'optax>=99; extra == "fast"'],
    }
    monkeypatch.setattr(software.metadata, "requires", requires.get)
    assert [str(package.required) for package in software.packages("xlstm_jax")] == ["jax>=0.4"]
    added = list(software.packages("xlstm_jax", "gpu"))
    assert [package.required.name for package in added] == ["jax", "optax"]
    assert [package.healthy for package in added] == [True, False]


def test_a_package_is_healthy_only_in_a_version_that_was_asked_for():
    required = Requirement("jax>=0.10")
    healthy = {version: software.Package(required, version).healthy for version in [None, "0.9", "0.10.0rc1", "0.12.1"]}
    assert healthy == {None: False, "0.9": False, "0.10.0rc1": False, "0.12.1": True}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_backend_that_does_not_exist_is_an_obstacle(kernel, unchecked_shapes):
    assert "There is no" in kernel.obstacle("no-such-backend")


def only(monkeypatch, name, *backends):
    """Let self-tests test these backends of one kernel alone."""
    (kernel,) = (kernel for kernel in KERNELS if kernel.name == name)
    monkeypatch.setattr(self_tests, "KERNELS", [kernel._replace(backends=backends)])


@pytest.mark.parametrize(("relative", "verdict"), [(1e-6, "✓ 1e-06"), (1e-3, "✗ 1e-03"), (np.nan, "✗ nan")])
def test_an_error_is_measured_against_the_limit(relative, verdict):
    def measure(backend):
        hidden = np.array([1.0, 100.0])
        off = hidden + np.array([100.0 * relative, 0.0]) if backend == "chunkwise" else hidden
        return {"outputs": hidden, "last memory": off, self_tests.IN_PARTS: hidden}

    assert self_tests._verdict(measure, "chunkwise") == (verdict, "1e-05", "last memory")


def test_outputs_that_are_off_are_found(monkeypatch):
    real = mlstm_api.mlstm_chunkwise

    def wrong(*arguments):
        hidden, state = real(*arguments)
        return hidden.at[:, 5].mul(1.001), state

    monkeypatch.setattr(mlstm_api, "mlstm_chunkwise", wrong)
    only(monkeypatch, "mLSTM", "chunkwise")
    section = self_tests.check_numbers("Self-tests")
    assert [row[3].partition(" ")[0] for row in section.rows] == ["✗"]
    (problem,) = section.problems
    assert problem.startswith("mLSTM chunkwise on ")


@jax.custom_jvp
def with_wrong_gradient(x):
    return x


with_wrong_gradient.defjvp(lambda primals, tangents: (primals[0], 1.01 * tangents[0]))


def test_a_gradient_that_is_off_is_found_and_named(monkeypatch):
    real = slstm_api.slstm_recompute
    monkeypatch.setattr(
        slstm_api,
        "slstm_recompute",
        lambda gates, recurrent, *rest: real(gates, with_wrong_gradient(recurrent), *rest),
    )
    only(monkeypatch, "sLSTM", "recompute")
    (problem,) = self_tests.check_numbers("Self-tests").problems
    assert problem.startswith("sLSTM recompute on ")
    assert problem.endswith(": 1e-02, limit 1e-05, in gradient of recurrent")


def test_a_state_that_is_lost_between_two_parts_is_found(monkeypatch):
    monkeypatch.setattr(self_tests, "append", lambda cache, *_: cache)
    only(monkeypatch, "attention", "xla")
    (problem,) = self_tests.check_numbers("Self-tests").problems
    assert problem.startswith("attention xla on ")
    assert problem.endswith("in outputs in two parts")


def test_a_kernel_that_crashes_fails_its_test_alone_with_the_first_line_of_the_error(capsys, monkeypatch):
    def crash(*_, **__):
        raise RuntimeError("out of registers\nand much more")

    monkeypatch.setattr(mlstm_api, "mlstm_parallel", crash)
    monkeypatch.setattr(disk, "FILE_BYTES", 2**20)
    only(monkeypatch, "mLSTM", "parallel", "reference")
    assert doctor() == 1
    shown = capsys.readouterr().out
    assert "✗ mLSTM parallel on " in shown
    assert "RuntimeError: out of registers" in shown
    assert "and much more" not in shown
    assert sum(line.startswith("✗ ") for line in shown.splitlines()) == 1


def test_collectives_over_all_devices_agree_with_numpy():
    section = devices.check_collectives("Collectives")
    assert section.rows == [(name, "✓") for name in ("psum", "all_gather", "psum_scatter", "ppermute")]
    assert section.problems == []
    assert section.notes[0] == "Over 8 devices in 1 process."
    assert "GB/s" in section.notes[1]


@pytest.mark.parametrize("name", ["psum", "all_gather", "psum_scatter", "ppermute"])
def test_a_collective_that_brings_wrong_numbers_is_found(name, monkeypatch):
    real = getattr(devices.lax, name)
    monkeypatch.setattr(devices.lax, name, lambda *arguments, **options: real(*arguments, **options) + 1)
    section = devices.check_collectives("Collectives")
    (problem,) = section.problems
    assert problem.startswith(f"{name} over 8 devices in 1 process: ArithmeticError: the result on")
    assert [row[0] for row in section.rows if row[1].startswith("✗")] == [name]


def test_one_device_has_no_collectives(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    section = devices.check_collectives("Collectives")
    assert section.rows == section.problems == []
    assert section.notes == ["There is one device, so there is nothing to test."]


def test_a_healthy_folder_is_left_as_it_was(tmp_path):
    section = disk.check_disk("Disk", [tmp_path], with_speed=True)
    results = {check: result for _, check, result in section.rows}
    assert list(results) == ["writable", "free space", "file system", "atomic rename", "64 MiB"]
    assert results["64 MiB"].startswith("✓ written and flushed at ")
    assert section.problems == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "a file", "read-only"])
def test_a_folder_that_takes_no_files_is_a_problem(kind, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    if kind == "a file":
        folder.touch()
    if kind == "read-only":
        folder.mkdir(mode=0o500)
        if os.access(folder, os.W_OK):  # the administrator may write anywhere
            monkeypatch.setattr(disk.tempfile, "TemporaryDirectory", refuse)
    section = disk.check_disk("Disk", [folder, tmp_path], with_speed=False)
    (problem,) = section.problems[:1]
    assert str(folder) in problem
    assert section.rows[0][2].startswith("✗")


def refuse(**_):
    raise PermissionError("Permission denied")


def test_doctor_checks_every_folder_it_is_given_and_fails_with_one(capsys, tmp_path):
    assert doctor("--quick", "--path", tmp_path, "--path", tmp_path / "missing") == 1
    shown = capsys.readouterr().out
    assert f"{tmp_path} " in shown
    assert f"✗ {tmp_path / 'missing'}: FileNotFoundError" in shown


def test_little_space_is_a_warning_and_no_problem(tmp_path, monkeypatch):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage(0, 0, 3 * 2**30))
    section = disk.check_disk("Disk", [tmp_path], with_speed=False)
    assert (str(tmp_path), "free space", "! 3.0 GiB") in section.rows
    assert section.problems == []


@pytest.mark.parametrize("kept", [5, 2**20])
def test_a_disk_that_loses_what_is_written_is_a_problem(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(disk.os, "fsync", lambda number: os.truncate(number, kept))
    section = disk.check_disk("Disk", [tmp_path], with_speed=True)
    (problem,) = section.problems
    assert "what was read is not what was written" in problem


def test_a_rename_that_copies_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.Path, "replace", lambda self, target: target.write_text(self.read_text()))
    section = disk.check_disk("Disk", [tmp_path], with_speed=False)
    (problem,) = section.problems
    assert "a renamed file or folder is not what it was" in problem


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/home", "ext4"),
        ("/data/run", "nfs4: on a network"),
        ("/data set/run", "lustre: on a network"),
        ("/dev/shm/run", "tmpfs: in memory, lost when the machine stops"),
        ("/twice", "fuse.sshfs: on a network"),
        ("/database", "ext4"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(folder, expected, tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nserver:/ /data nfs4 rw 0 0\nmds:/ /data\\040set lustre rw 0 0\n"
        "tmpfs /dev/shm tmpfs rw 0 0\n/dev/b /twice xfs rw 0 0\nhost:/ /twice fuse.sshfs rw 0 0\n"
    )
    assert disk.file_system(Path(folder), mounts) == expected
    assert disk.file_system(Path(folder), tmp_path / "missing") == "unknown"
