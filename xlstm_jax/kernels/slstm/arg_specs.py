"""Named shapes and gates of the sLSTM that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.kernels.slstm.state import SLSTMState


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """The shape of a call, and the range of its gates."""

    batch_size: int
    length: int
    num_heads: int
    head_dim: int
    igate_mean: float = 0.0
    fgate_mean: float = 3.0

    def arguments(self, key: jax.Array, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, jax.Array]:
        """Draw the gates before the recurrence, and a recurrent kernel that keeps the scale of the hidden state."""
        gates_key, recurrent_key = jax.random.split(key)
        h, d = self.num_heads, self.head_dim
        gates = jax.random.normal(gates_key, (self.batch_size, self.length, 4, h, d), dtype)
        recurrent = jax.random.normal(recurrent_key, (h, d, 4, d), dtype) * d**-0.5
        means = jnp.array([self.igate_mean, self.fgate_mean, 0.0, 0.0], dtype)
        return gates + means[:, None, None], recurrent

    def state(self, key: jax.Array, dtype: DTypeLike = jnp.float32) -> SLSTMState:
        """Draw a state that could be that after a part of a sequence."""
        shape = (self.batch_size, self.num_heads, self.head_dim)
        ratio, output_gate, normalizer, stabilizer = jax.random.normal(key, (4, *shape), dtype)
        ratio, normalizer = jnp.tanh(ratio), 1 + jnp.abs(normalizer)
        return SLSTMState(jax.nn.sigmoid(output_gate) * ratio, ratio * normalizer, normalizer, stabilizer)


SMALL = {
    "several tokens": ArgSpec(3, 17, 2, 5),
    "one token": ArgSpec(2, 1, 2, 3),
    "one cell a head": ArgSpec(1, 7, 3, 1),
    "much is forgotten": ArgSpec(1, 20, 2, 4, igate_mean=4.0, fgate_mean=-2.0),
    "much is kept": ArgSpec(1, 41, 2, 4, igate_mean=-4.0, fgate_mean=8.0),
}
"""Small enough for a test to compare each with the reference in float64."""
