"""One of two processes that save together and read it again: `one_of_two.py <index> <port> <folder>`."""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from checkpoint.states import assert_laid_out_alike, make_state, parts

from xlstm_jax.checkpoint.loaders import gather_states, own_states
from xlstm_jax.checkpoint.retention import Retention
from xlstm_jax.checkpoint.soundness import is_sound
from xlstm_jax.checkpoint.store import CheckpointStore
from xlstm_jax.checkpoint.timer import CheckpointTimer


class Loader:
    """Stands in another place in each process."""

    def get_state(self):
        """Return a state that is longer in the second process."""
        return {"rows": [jax.process_index()] * (1 + jax.process_index())}


@jax.jit
def are_equal(tree, other):
    """Compare arrays that lie in both processes."""
    return jnp.all(jnp.array(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.all(x == y), tree, other))))


def main(index, port, folder):
    """Save three checkpoints of which one is dropped, then read the last on another mesh."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    assert CheckpointTimer(1e-9 if index == "0" else 1e9).is_due(1)
    state = make_state(fsdp=8)
    assert is_sound(state.params, state.opt_state)
    loaders = gather_states({"train": Loader()})
    store = CheckpointStore(folder, retention=Retention(max_to_keep=1, monitor="loss"))
    for step, loss in [(1, 3.0), (2, 1.0), (3, 2.0)]:
        store.save(step, parts(state), {"metadata": {}, "data": {"loaders": loaders}})
        store.save_metrics(step, {"loss": loss})
    assert (store.steps(), store.latest(), store.best()) == ([2, 3], 3, 2)
    like, expected = (parts(make_state(seed, dp=2, fsdp=2, tp=2)) for seed in (1, 0))
    restored = store.restore(3, like)
    assert_laid_out_alike(restored, like)
    assert are_equal((restored["params"], restored["opt_state"]), (expected["params"], expected["opt_state"]))
    assert own_states(store.read_document(3, "data")["loaders"]) == {"train": Loader().get_state()}
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
