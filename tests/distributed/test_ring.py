"""Communication in rings against the collectives of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh
from tolerances import assert_close

from xlstm_jax.distributed import (
    async_gather,
    async_gather_bidirectional,
    async_gather_split,
    async_scatter,
    async_scatter_split,
)

SIZES = [1, 2, 4, 8]


def everywhere(function, size):
    """Run on a ring with a row of the input per device; results get the device as leading axis."""
    return on_mesh(lambda x: jax.tree.map(lambda y: y[None], function(x[0])), make_mesh(tp=size), P("tp"), P("tp"))


@pytest.mark.parametrize("shift_up", [True, False])
@pytest.mark.parametrize("gather", [async_gather, async_gather_bidirectional])
@pytest.mark.parametrize("size", SIZES)
def test_a_ring_gathers_the_arrays_of_all_devices_in_ring_order(size, gather, shift_up):
    x = jnp.arange(size * 3.0).reshape(size, 3)
    gathered = np.stack(everywhere(lambda x: gather(x, "tp", shift_up), size)(x), axis=1)
    for device in range(size):
        order = [(device - step if shift_up else device + step) % size for step in range(size)]
        np.testing.assert_array_equal(gathered[device], x[jnp.array(order)])


@pytest.mark.parametrize("size", SIZES)
def test_halves_travel_both_ways(size):
    x = jnp.arange(size * 4.0).reshape(size, 4)
    gathered = np.stack(everywhere(lambda x: async_gather_split(x, "tp"), size)(x), axis=1)
    for device in range(size):
        up, down = ([(device + sign * step) % size for step in range(size)] for sign in (-1, 1))
        np.testing.assert_array_equal(gathered[device, :size], x[jnp.array(up), :2])
        np.testing.assert_array_equal(gathered[device, size:], x[jnp.array(down), 2:])


@pytest.mark.parametrize("variant", ["up", "down", "split"])
@pytest.mark.parametrize("size", SIZES)
def test_a_ring_scatters_the_sums_that_psum_scatter_gives(size, variant):
    x = jax.random.normal(jax.random.key(0), (size, size, 5))

    def ring(x):
        index = lax.axis_index("tp")
        far_to_near = range(size - 1, -1, -1)
        if variant == "down":
            return async_scatter([x[(index - hops) % size] for hops in far_to_near], "tp", shift_up=False)
        parts = [x[(index + hops) % size] for hops in far_to_near]
        return async_scatter_split(parts, "tp") if variant == "split" else async_scatter(parts, "tp")

    assert_close(everywhere(ring, size)(x), x.sum(0))


def test_scattering_the_wrong_number_of_arrays_is_refused():
    with pytest.raises(ValueError, match="each of the 4 devices of 'tp', not 3"):
        everywhere(lambda x: async_scatter([x, x, x], "tp"), 4)(jnp.zeros((4, 2)))


def test_a_ring_moves_whole_trees():
    x = jnp.arange(4.0).reshape(4, 1)
    gathered = everywhere(lambda x: async_gather({"a": x, "b": -x}, "tp"), 4)(x)
    np.testing.assert_array_equal(gathered[1]["b"], -gathered[1]["a"])
