"""Flags for XLA, added to those of the user."""

import os
import subprocess
import sys

import pytest

from xlstm_jax.distributed import set_XLA_flags, simulate_CPU_devices


@pytest.fixture
def environment(monkeypatch):
    """Restore the variables that a test changes."""
    for name in ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION", "PJRT_NPROC"):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    return monkeypatch


def test_simulating_devices_keeps_the_other_flags(environment):
    environment.setenv("XLA_FLAGS", "--xla_dump_to=x")
    simulate_CPU_devices(4)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=x --xla_force_host_platform_device_count=4"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["PJRT_NPROC"] == "64"


def test_flags_and_memory_of_the_user_stay(environment):
    environment.setenv("XLA_FLAGS", "--xla_gpu_triton_gemm_any=false --xla_dump_to=x")
    environment.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    set_XLA_flags()
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == ["--xla_gpu_triton_gemm_any=false", "--xla_dump_to=x"]
    assert sum(flag.startswith("--xla_gpu_triton_gemm_any") for flag in flags) == 1
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


def test_setting_flags_twice_changes_nothing(environment):
    set_XLA_flags()
    once = os.environ["XLA_FLAGS"]
    set_XLA_flags()
    assert os.environ["XLA_FLAGS"] == once
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.90"


def test_this_version_of_xla_knows_all_flags_and_simulates_the_devices():
    program = (
        "from xlstm_jax.distributed import set_XLA_flags, simulate_CPU_devices\n"
        "set_XLA_flags(); simulate_CPU_devices(3)\n"
        "import jax; print(len(jax.devices('cpu')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert result.stdout.strip() == "3", result.stderr
