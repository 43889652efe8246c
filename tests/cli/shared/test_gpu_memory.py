"""JAX gets nearly all memory of a GPU, unless the environment says otherwise."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from jaxlib import xla_client

from xlstm_jax.cli.checks import devices
from xlstm_jax.cli.main import main
from xlstm_jax.cli.shared import gpu_memory
from xlstm_jax.cli.shared.gpu_memory import GIB, GPU, VARIABLE, choose_fraction, list_gpus, set_memory_fraction
from xlstm_jax.distributed import set_XLA_flags

H200 = GPU("NVIDIA H200", int(139.8 * GIB))


class FakeNVML:
    """A driver's library for GPUs of given names and sizes; one without memory cannot be asked."""

    def __init__(self, gpus, *, starts=True):
        self.gpus, self.is_open = gpus, False
        self.nvmlInit_v2 = lambda: self.open() if starts else 9
        self.nvmlShutdown = self.close
        self.nvmlDeviceGetCount_v2 = lambda count: put(count, len(gpus))
        self.nvmlDeviceGetHandleByIndex_v2 = lambda index, handle: put(handle, index.value + 1)
        self.nvmlDeviceGetName = self.write_name
        self.nvmlDeviceGetMemoryInfo = self.write_memory

    def open(self):
        self.is_open = True
        return 0

    def close(self):
        self.is_open = False
        return 0

    def write_name(self, handle, name, length):
        name.value = self.gpus[handle.value - 1].name.encode()
        return 0

    def write_memory(self, handle, memory):
        memory._obj.total = self.gpus[handle.value - 1].memory
        return 0 if memory._obj.total else 3


def put(reference, value):
    """Write to where a C function would."""
    reference._obj.value = value
    return 0


@pytest.fixture
def environment(monkeypatch):
    """An environment that configures no memory, on a machine with one H200."""
    for name in list(os.environ):
        if name.startswith(("XLA_PYTHON_CLIENT_", "XLA_CLIENT_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv(VARIABLE, "")  # so that the test's end also removes what the code has set
    for name in (VARIABLE, "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_memory, "list_gpus", lambda: [H200])
    return monkeypatch


def test_gpus_are_listed_as_the_driver_reports_them(monkeypatch):
    nvml = FakeNVML([H200, GPU("NVIDIA broken", 0), GPU("NVIDIA T4", 16 * GIB)])
    monkeypatch.setattr(gpu_memory.ctypes, "CDLL", lambda name: nvml)
    assert list_gpus() == [H200, GPU("NVIDIA T4", 16 * GIB)]
    assert not nvml.is_open


def test_a_driver_that_does_not_start_lists_no_gpu(monkeypatch):
    monkeypatch.setattr(gpu_memory.ctypes, "CDLL", lambda name: FakeNVML([H200], starts=False))
    assert list_gpus() == []


@pytest.mark.parametrize(("gibibytes", "fraction"), [(139.8, 0.95), (79.6, 0.95), (24, 0.91), (16, 0.87), (6, 0.75)])
def test_small_gpus_keep_two_gibibytes_for_what_is_not_in_jaxs_pool(gibibytes, fraction):
    assert choose_fraction(int(gibibytes * GIB)) == fraction


def test_jax_reads_the_fraction_that_is_set(environment):
    set_memory_fraction()
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.95


def test_the_smallest_gpu_decides(environment):
    environment.setattr(gpu_memory, "list_gpus", lambda: [H200, GPU("NVIDIA T4", 16 * GIB)])
    set_memory_fraction()
    assert os.environ[VARIABLE] == "0.87"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (VARIABLE, "0.5"),
        ("XLA_CLIENT_MEM_FRACTION", "0.5"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50"),
        ("CUDA_VISIBLE_DEVICES", "MIG-1f"),
        ("JAX_PLATFORMS", "cpu"),
    ],
)
def test_an_environment_that_configures_memory_is_left_as_it_is(environment, name, value):
    environment.setenv(name, value)
    before = dict(os.environ)
    set_memory_fraction()
    assert dict(os.environ) == before


def test_a_machine_without_gpus_keeps_its_environment(environment):
    environment.setattr(gpu_memory, "list_gpus", list)
    set_memory_fraction()
    assert VARIABLE not in os.environ


def test_the_documented_flags_do_not_clash_with_the_new_name_of_the_fraction(environment):
    environment.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    environment.setenv("XLA_FLAGS", "")
    set_XLA_flags()
    assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.5


@pytest.mark.parametrize("words", [["train", "--cfg", "job"], ["doctor", "--json", "/"], ["bench", "--list"]])
def test_a_command_sets_the_fraction_before_jax_starts(words, tmp_path):
    code = (
        "import os, sys; from jax._src import xla_bridge\n"
        "import xlstm_jax.cli.main as cli\n"
        "def check(): print('set', xla_bridge.backends_are_initialized()); sys.exit()\n"
        "cli.set_memory_fraction = check\n"
        f"cli.main({words})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout == "set False\n"


def test_a_run_that_a_launcher_starts_sets_the_fraction_too(environment, tmp_path):
    from xlstm_jax.cli.train import train_in

    assert train_in(tmp_path, {"nonsense": 1}) == 2
    assert os.environ[VARIABLE] == "0.95"


def test_the_report_of_a_machine_sets_no_fraction(environment, tmp_path):
    environment.chdir(tmp_path)
    main(["report", "nowhere"])
    assert VARIABLE not in os.environ


def test_doctor_tells_how_much_of_a_gpu_jax_may_use(environment):
    gpu = SimpleNamespace(
        platform="gpu", device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": int(132.8 * GIB)}
    )
    environment.setattr(jax, "local_devices", lambda: [gpu])
    environment.setattr(devices, "_check_matmul", lambda device: 0.1)
    environment.setattr(devices, "describe_cache", lambda: "off")
    set_memory_fraction()
    section = devices.check_devices("Devices")
    assert "132.8 GiB" in section.rows[0][2]
    assert f"95% of a GPU's memory; to change that, set {VARIABLE}" in section.notes[0]
