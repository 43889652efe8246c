"""That a GPU, or the kernels for it, are not used is said together with the way out."""

from types import SimpleNamespace

import jax
import pytest

from xlstm_jax.cli.checks import devices
from xlstm_jax.cli.shared import gpu_check
from xlstm_jax.cli.shared.gpu_check import gpu_problem
from xlstm_jax.cli.shared.gpu_memory import GIB, GPU


def device(kind, platform="gpu"):
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=dict)


@pytest.fixture
def pretend(monkeypatch):
    """Pretend that JAX has some devices, and the machine some GPUs."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def apply(in_jax, in_machine=(), version=(0, 10, 2), python=(3, 11)):
        monkeypatch.setattr(jax, "local_devices", lambda: in_jax)
        monkeypatch.setattr(jax, "__version_info__", version)
        monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
        monkeypatch.setattr(gpu_check, "PYTHON", python)
        monkeypatch.setattr(gpu_check, "list_gpus", lambda: [GPU(name, 80 * GIB) for name in in_machine])

    return apply


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_a_hopper_gpu_without_its_kernels_needs_another_python(pretend, kind):
    pretend([device(kind)])
    assert gpu_problem() == (
        f"The fast kernels for this {kind} need jax 0.11 or newer, and this is jax 0.10.2 on Python 3.11: install the "
        "package in an environment with Python 3.12 or newer."
    )


def test_on_a_newer_python_an_upgrade_is_enough(pretend):
    pretend([device("NVIDIA H200")], python=(3, 12))
    assert str(gpu_problem()).endswith("on Python 3.12: pip install -U jax.")


@pytest.mark.parametrize(("kind", "version"), [("NVIDIA H200", (0, 11, 0)), ("NVIDIA A100-SXM4-80GB", (0, 10, 2))])
def test_kernels_that_are_used_or_do_not_exist_are_no_problem(pretend, kind, version):
    pretend([device(kind)], version=version)
    assert gpu_problem() is None


def test_a_hopper_gpu_that_jax_does_not_use_needs_an_extra_and_another_python(pretend):
    pretend([device("cpu", "cpu")], ["NVIDIA H200"])
    problem = str(gpu_problem())
    assert problem.startswith("JAX does not use the NVIDIA H200 of this machine: ")
    assert problem.endswith("install the extra cuda12 or cuda13 with Python 3.12 or newer.")


def test_another_gpu_that_jax_does_not_use_needs_an_extra(pretend):
    pretend([device("cpu", "cpu")], ["NVIDIA A40"])
    assert gpu_problem() == "JAX does not use the NVIDIA A40 of this machine: install the extra cuda12 or cuda13."


@pytest.mark.parametrize(("name", "value"), [("JAX_PLATFORMS", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_a_cpu_that_was_chosen_is_no_problem(pretend, monkeypatch, name, value):
    pretend([device("cpu", "cpu")], ["NVIDIA H200"])
    monkeypatch.setenv(name, value)
    assert gpu_problem() is None


def test_a_machine_without_gpus_has_no_problem(pretend):
    pretend([device("cpu", "cpu")])
    assert gpu_problem() is None


def test_doctor_tells_what_is_wrong_with_a_gpu(pretend, monkeypatch):
    pretend([device("NVIDIA H200")])
    monkeypatch.setattr(devices, "_check_matmul", lambda device: 0.1)
    monkeypatch.setattr(devices, "describe_cache", lambda: "off")
    assert gpu_problem() in devices.check_devices("Devices").notes
