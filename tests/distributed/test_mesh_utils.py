"""Meshes from configs, possible and impossible ones, and processes that find each other."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ({}, (8, 1, 1, 1)),
        ({"model_axis_size": 2}, (4, 1, 1, 2)),
        ({"data_axis_size": 2, "fsdp_axis_size": -1, "pipeline_axis_size": 2}, (2, 2, 2, 1)),
        ({"data_axis_size": 2, "fsdp_axis_size": 2, "pipeline_axis_size": 1, "model_axis_size": 2}, (2, 2, 1, 2)),
    ],
)
def test_the_mesh_has_the_sizes_asked_for_and_the_model_axis_innermost(sizes, shape):
    mesh = initialize_mesh(ParallelConfig(**sizes))
    assert mesh.axis_names == ("dp", "fsdp", "pp", "tp")
    assert mesh.devices.shape == shape
    assert mesh.devices.reshape(-1).tolist() == jax.devices()


def test_the_mesh_can_be_made_of_some_devices_with_other_names():
    config = ParallelConfig(data_axis_name="data", model_axis_name="model", model_axis_size=2)
    mesh = initialize_mesh(config, device_array=np.array(jax.devices()[4:]))
    assert mesh.axis_names == ("data", "fsdp", "pp", "model")
    assert mesh.devices.shape == (2, 1, 1, 2)
    assert mesh.devices[0, 0, 0, 0] == jax.devices()[4]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"data_axis_size": 3}, "need 3 devices. Set data_axis_size=8"),
        ({"data_axis_size": 16}, "need 16 devices. Set data_axis_size=8"),
        ({"fsdp_axis_size": 3}, "multiple of 3 devices. Set fsdp_axis_size=1"),
        ({"fsdp_axis_size": 16}, "multiple of 16 devices. Set fsdp_axis_size=8"),
        ({"fsdp_axis_size": 3, "model_axis_size": 3}, "multiple of 9 devices. Set data_axis_size=-1 and all other"),
        ({"fsdp_axis_size": -1}, "not dp and fsdp"),
        ({"model_axis_size": 0}, "model_axis_size must be at least 1"),
        ({"data_axis_size": -2}, "data_axis_size must be at least 1"),
    ],
)
def test_an_impossible_mesh_is_an_error_that_lists_the_devices_and_the_sizes(sizes, reason):
    config = ParallelConfig(**sizes)
    with pytest.raises(ValueError, match=reason) as error:
        initialize_mesh(config)
    message = str(error.value)
    assert all(f"{name}={size}" in message for name, size in config.axis_sizes.items())
    assert "8 devices" in message
    assert str(jax.devices()[3]) in message


def test_a_mesh_of_no_devices_is_refused():
    with pytest.raises(ValueError, match="for 0 devices: there is no device to use"):
        initialize_mesh(ParallelConfig(), np.array([]))


@pytest.mark.parametrize(("num_devices", "shape"), [(1, (1, 1, 1, 1)), (4, (1, 2, 1, 2)), (8, (1, 4, 1, 2))])
def test_an_fsdp_axis_that_may_shrink_takes_the_devices_there_are(num_devices, shape):
    config = ParallelConfig(fsdp_axis_size=8, fsdp_axis_shrinks=True, model_axis_size=shape[-1])
    assert initialize_mesh(config, np.array(jax.devices()[:num_devices])).devices.shape == shape


def test_an_fsdp_axis_that_shrinks_is_logged(caplog):
    config = ParallelConfig(fsdp_axis_size=8, fsdp_axis_shrinks=True)
    initialize_mesh(config, np.array(jax.devices()))
    assert not caplog.messages
    initialize_mesh(config, np.array(jax.devices()[:4]))
    assert caplog.messages == ["4 devices for fsdp_axis_size=8: parameters are sharded over 4."]


def test_an_fsdp_axis_that_may_shrink_does_not_leave_devices_out():
    with pytest.raises(ValueError, match=r"a multiple of 3 devices\. Set fsdp_axis_size=1"):
        initialize_mesh(ParallelConfig(fsdp_axis_size=3, fsdp_axis_shrinks=True))


def test_two_axes_of_one_name_are_refused():
    with pytest.raises(ValueError, match="four different names"):
        initialize_mesh(ParallelConfig(model_axis_name="dp"))


@pytest.mark.parametrize("field", ["fsdp_gather_dtype", "fsdp_grad_scatter_dtype"])
def test_a_precision_that_no_collective_has_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 'int8'"):
        ParallelConfig(**{field: "int8"})
    assert getattr(ParallelConfig(**{field: "bfloat16"}), field) == "bfloat16"


@pytest.mark.parametrize("field", ["remat", "fsdp_modules"])
def test_one_name_instead_of_a_list_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 'Block', but must be a list"):
        ParallelConfig(**{field: "Block"})


def test_module_names_may_be_given_as_tuples():
    assert ParallelConfig(remat=("Block",), fsdp_modules=("Embed",)).remat == ("Block",)


@pytest.mark.parametrize("variables", [{}, {"JAX_NUM_PROCESSES": "2"}, {"JAX_PROCESS_ID": "0"}])
def test_a_coordinator_without_the_number_of_processes_or_the_index_is_refused(monkeypatch, variables):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="set all three, or none"):
        initialize_mesh(ParallelConfig())


@pytest.mark.parametrize(
    ("variables", "starts"), [({"SLURM_STEP_NODELIST": "node1"}, True), ({"SLURM_JOB_ID": "1"}, False)]
)
def test_distributed_jax_starts_in_a_slurm_step_and_not_elsewhere(monkeypatch, variables, starts):
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **kwargs: calls.append(kwargs))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    initialize_mesh(ParallelConfig())
    assert calls == ([{}] if starts else [])
    initialize_mesh(ParallelConfig(), init_distributed_on_slurm=False)
    assert len(calls) == int(starts)


PROCESS = """
import jax
from jax.sharding import PartitionSpec as P
from xlstm_jax.distributed.mesh_utils import ParallelConfig, initialize_mesh
mesh = initialize_mesh(ParallelConfig(fsdp_axis_size=2))
total = jax.jit(jax.shard_map(lambda: jax.lax.psum(1, mesh.axis_names), mesh=mesh, in_specs=(), out_specs=P()))()
print(mesh.devices.shape, jax.process_count(), int(total))
mesh = initialize_mesh(ParallelConfig())  # a second mesh does not connect again
"""


def test_processes_with_the_coordinator_variables_make_one_mesh():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            env=os.environ
            | {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(index),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [stdout.strip() for stdout, _ in outputs] == ["(2, 2, 1, 1) 2 4"] * 2, outputs
