"""Times are FLOPs, traffic and communication over the rates of a device."""

import dataclasses

import pytest
from planning.setups import LLAMA, SHAPE, make_setup

from xlstm_jax.models.cost import count_flops
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.estimate import Assumptions, measured_cpu, step_flops, step_time
from xlstm_jax.planning.memory import PersistentMemory
from xlstm_jax.utils.accelerators import Accelerator

DEVICE = Accelerator("toy", 1e9, 1e8, 1e6, 1e5, 1e4, 1e3, devices_per_node=4)
ALL = Assumptions(compute=1.0, memory=1.0, links=1.0)
MEMORY = PersistentMemory(parameters=100, optimizer=200, other=7, batch=9)


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["xlstm", "llama"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_flops_are_those_that_the_step_executes_on_all_devices(shape, remat):
    setup = make_setup(dp=2, fsdp=2, shape=shape, remat=remat, accumulation=2)
    trainer = AbstractTrainer.from_setup(setup)
    counted = count_flops(trainer.train_step, trainer.state, trainer.exmp_batch, trainer.train_metrics_shapes)
    assert step_flops(setup).executed == 4 * counted


def test_each_part_has_its_own_rate():
    setup = make_setup(dp=2, tp=2)
    time = step_time(setup, MEMORY, {("tp",): 30.0}, DEVICE, ALL)
    assert time.compute == pytest.approx(step_flops(setup).executed / 4 / 1e8)
    assert time.optimizer == pytest.approx((2 * 300 + 100) / 1e5)
    assert time.communication == pytest.approx(30 / 1e4)
    assert time.total == time.compute + time.optimizer + time.communication


def test_half_precision_has_the_rate_of_half_precision():
    times = [
        step_time(
            make_setup(shape=dataclasses.replace(SHAPE, dtype=dtype, gate_dtype=dtype)), MEMORY, {}, DEVICE, ALL
        ).compute
        for dtype in ("bfloat16", "float32")
    ]
    assert times[1] == pytest.approx(10 * times[0])


@pytest.mark.parametrize(
    ("axes", "rate"), [(("tp",), 1e4), (("fsdp",), 1e4), (("dp",), 1e3), (("dp", "fsdp"), 1e3), (("fsdp", "tp"), 1e4)]
)
def test_a_ring_beyond_a_node_has_the_rate_of_the_network(axes, rate):
    setup = make_setup(dp=2, fsdp=2, tp=2)
    assert step_time(setup, MEMORY, {axes: 1.0}, DEVICE, ALL).communication == pytest.approx(1 / rate)


def test_a_cpu_is_measured_and_shared():
    one, two = measured_cpu(1), measured_cpu(2)
    assert one.bfloat16_flops == 2 * two.bfloat16_flops > 0
    assert one.memory == 2 * two.memory > 2**28
