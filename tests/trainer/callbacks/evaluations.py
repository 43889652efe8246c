"""What the tests of extended evaluations share."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import AXES

TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}


def placed(batches, trainer):
    """Spread batches over the mesh, as loaders do."""
    return [jax.device_put(batch, NamedSharding(trainer.mesh, P(AXES))) for batch in batches]
