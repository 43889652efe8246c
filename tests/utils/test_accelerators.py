"""The table of accelerators knows devices by the names that JAX gives them."""

import pytest

from xlstm_jax.utils.accelerators import ACCELERATORS, find_accelerator, of_device_kind

KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_is_known_by_the_name_that_jax_gives_it(kind):
    found = of_device_kind(kind)
    assert found is not None
    assert found.name == KINDS[kind]


def test_every_accelerator_is_found_by_its_name():
    assert [find_accelerator(accelerator.name) for accelerator in ACCELERATORS] == list(ACCELERATORS)


def test_an_unknown_accelerator_is_an_error_that_lists_those_known():
    with pytest.raises(ValueError, match=r"no accelerator 'h1000': choose from cpu, .*h100.*tpu-v5e"):
        find_accelerator("h1000")


def test_a_cpu_is_in_no_table():
    assert of_device_kind("cpu") is None
