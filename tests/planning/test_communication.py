"""Collectives are counted by hand in small programs, and predicted for real ones."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from planning.setups import LLAMA, SHAPE, make_setup

from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.communication import count_communication, estimate_communication
from xlstm_jax.planning.memory import list_parameters

pytestmark = pytest.mark.slow

NUMBERS = jnp.zeros((16, 3))
PROGRAMS = {
    "sum": (lambda x: lax.psum(x, "fsdp"), {("fsdp",): 2 * 192 * 3 / 4}),
    "sum over two axes": (lambda x: lax.psum(x, ("dp", "fsdp")), {("dp", "fsdp"): 2 * 192 * 7 / 8}),
    "axis of one device": (lambda x: lax.psum(x, "tp"), {}),
    "gather": (lambda x: lax.all_gather(x, "fsdp"), {("fsdp",): 4 * 192 * 3 / 4}),
    "scatter": (lambda x: lax.psum_scatter(x, "fsdp", tiled=True), {("fsdp",): 192 * 3 / 4}),
    "shift": (lambda x: lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]), {("fsdp",): 192}),
    "scan": (
        lambda x: lax.scan(lambda y, _: (lax.psum(y, "dp"), None), x, length=5)[0],
        {("dp",): 5 * 2 * 192 / 2},
    ),
    "cond": (
        lambda x: lax.cond(x[0, 0] > 0, lambda y: lax.psum(y, "dp"), lambda y: y, x),
        {("dp",): 2 * 192 / 2},
    ),
}
MESHES = [{"dp": 2, "fsdp": 4}, {"dp": 2, "tp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_collective_counts_what_a_device_sends_around_a_ring(name):
    function, expected = PROGRAMS[name]
    program = on_mesh(function, make_mesh(dp=2, fsdp=4), in_specs=P(), out_specs=P())
    assert count_communication(program.trace(NUMBERS)) == expected


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["xlstm", "llama"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_what_a_step_sends_is_known_from_its_layout(sizes, shape, remat):
    # Long rows: the norms of gradients and the sums of metrics, which nobody predicts, are little beside activations.
    setup = make_setup(**sizes, shape=shape, remat=remat, rows=32, length=512, accumulation=2)
    trainer = AbstractTrainer.from_setup(setup)
    counted = count_communication(trainer.traced)
    estimated = estimate_communication(setup, list_parameters(trainer))
    assert sum(estimated.values()) == pytest.approx(sum(counted.values()), rel=0.05)
    assert set(estimated) <= set(counted)


def test_parameters_are_gathered_in_the_precision_that_is_asked_for():
    wide, narrow = (make_setup(fsdp=8, fsdp_gather_dtype=dtype) for dtype in (None, "bfloat16"))
    parameters = list_parameters(AbstractTrainer.from_setup(wide))
    split = [parameter for parameter in parameters if parameter.axes]
    volumes = [estimate_communication(setup, split)["fsdp",] for setup in (wide, narrow)]
    assert volumes[1] == 0.75 * volumes[0]
