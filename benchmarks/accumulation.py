"""Gradient accumulation: how compile time and memory grow with the number of minibatches.

    python benchmarks/accumulation.py

Compiles the gradient step of a small residual network with 2, 8 and 32 minibatches of one size, by loop and by scan.
Compile times are ratios to 2 minibatches in one run (the least of three); memory is what XLA reserves for temporaries,
in units of one gradient. For scale, the temporaries of one minibatch without accumulation are given too.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from xlstm_jax.common_types import PyTree, TrainState
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.single_gpu import accumulate_gradients_loop, accumulate_gradients_scan

FEATURES, LAYERS, ROWS_PER_MINIBATCH = 256, 8, 128
NUM_MINIBATCHES = (2, 8, 32)
REPEATS = 3


class Network(nn.Module):
    """Residual layers, deep enough that activations count."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transform a batch of rows."""
        for _ in range(LAYERS):
            x = x + nn.Dense(FEATURES)(nn.gelu(x))
        return x


def loss_fn(params: PyTree, apply_fn: Callable, batch: Batch, rng: jax.Array) -> tuple:
    """Squared error, with a metric whose log mode is a string."""
    del rng
    loss = jnp.mean(jnp.square(apply_fn({"params": params}, batch.inputs) - batch.targets))
    return loss, ({"loss": {"value": loss, "count": 1, "log_modes": ["mean"]}}, None)


def measure(accumulate: Callable, state: TrainState, num_minibatches: int) -> tuple[float, float]:
    """Return the least compile time in seconds, and the temporaries in bytes."""
    rows = jax.ShapeDtypeStruct((ROWS_PER_MINIBATCH * num_minibatches, FEATURES), jnp.float32)
    seconds = []
    for _ in range(REPEATS):
        step = functools.partial(accumulate, num_minibatches=num_minibatches, loss_fn=loss_fn)
        lowered = jax.jit(lambda *args, step=step: step(*args)[0]).lower(
            state, Batch(inputs=rows, targets=rows), jax.random.key(0)
        )
        start = time.perf_counter()
        compiled = lowered.compile()
        seconds.append(time.perf_counter() - start)
    return min(seconds), compiled.memory_analysis().temp_size_in_bytes


def main() -> None:
    """Print the table."""
    jax.config.update("jax_enable_compilation_cache", False)
    model = Network()
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
    gradient_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    _, one = measure(accumulate_gradients_loop, state, 1)
    mebibytes = gradient_bytes / 2**20
    print(f"one minibatch: {one / gradient_bytes:.2f} gradients of temporaries ({mebibytes:.1f} MiB a gradient)\n")
    print("| variant | minibatches | compile time / that of 2 | temporaries / gradient |\n|---|---|---|---|")
    for name, accumulate in (("loop", accumulate_gradients_loop), ("scan", accumulate_gradients_scan)):
        results = {n: measure(accumulate, state, n) for n in NUM_MINIBATCHES}
        for n, (seconds, temporaries) in results.items():
            print(f"| {name} | {n} | {seconds / results[2][0]:.2f} | {temporaries / gradient_bytes:.2f} |")


if __name__ == "__main__":
    main()
