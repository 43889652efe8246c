"""Named shapes and gates of the mLSTM that tests and benchmarks share."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from xlstm_jax.kernels.mlstm.state import MLSTMState


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """The shape of a call, and the range of its gates."""

    batch_size: int
    length: int
    num_heads: int
    qk_dim: int
    v_dim: int
    chunk_size: int = 64
    igate_mean: float = 0.0
    fgate_mean: float = 3.0

    def arguments(self, key: jax.Array, dtype: DTypeLike = jnp.float32) -> tuple[jax.Array, ...]:
        """Draw q, k, v and the pre-activations of the gates; these are float32 at least."""
        heads, gate_dtype = (self.batch_size, self.length, self.num_heads), jnp.promote_types(dtype, jnp.float32)
        shapes = [(*heads, self.qk_dim), (*heads, self.qk_dim), (*heads, self.v_dim), heads, heads]
        q, k, v, igate, fgate = (
            jax.random.normal(key, shape, gate_dtype if shape == heads else dtype)
            for key, shape in zip(jax.random.split(key, 5), shapes, strict=True)
        )
        return q, k, v, igate + self.igate_mean, fgate + self.fgate_mean

    def state(self, key: jax.Array, dtype: DTypeLike = jnp.float32) -> MLSTMState:
        """Draw a state that could be that after a part of a sequence."""
        heads = (self.batch_size, self.num_heads)
        shapes = [(*heads, self.qk_dim, self.v_dim), (*heads, self.qk_dim), heads]
        keys = jax.random.split(key, 3)
        return MLSTMState(*(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)))


SMALL = {
    "several chunks": ArgSpec(2, 24, 2, 4, 6, chunk_size=8),
    "prime length": ArgSpec(1, 23, 2, 4, 6, chunk_size=8),
    "one token": ArgSpec(2, 1, 2, 4, 6, chunk_size=8),
    "chunks of one": ArgSpec(1, 7, 1, 3, 2, chunk_size=1),
    "less than a chunk": ArgSpec(1, 11, 1, 8, 4, chunk_size=64),
    "input gates of the 7B": ArgSpec(1, 20, 2, 4, 8, chunk_size=8, igate_mean=-10.0, fgate_mean=5.0),
    "much is forgotten": ArgSpec(1, 20, 2, 4, 8, chunk_size=8, igate_mean=4.0, fgate_mean=-1.0),
    "much is kept": ArgSpec(1, 41, 2, 8, 4, chunk_size=16, igate_mean=4.0, fgate_mean=8.0),
}
"""Small enough for a test to compare each with the reference in float64."""

CPU = {
    "demo, short": ArgSpec(8, 256, 4, 32, 64, chunk_size=32, igate_mean=-3.0, fgate_mean=4.0),
    "demo, long": ArgSpec(2, 1024, 4, 64, 128, igate_mean=-3.0, fgate_mean=4.0),
    "equal heads": ArgSpec(1, 2048, 4, 64, 64, igate_mean=-3.0, fgate_mean=4.0),
    "wide heads": ArgSpec(1, 1024, 2, 128, 256, igate_mean=-3.0, fgate_mean=4.0),
}
"""Training shapes for a laptop, with the fastest chunk size there."""

GPU = {
    "7B": ArgSpec(8, 8192, 8, 256, 512, igate_mean=-10.0, fgate_mean=4.5),
    "1.4B, 8 heads": ArgSpec(8, 8192, 8, 128, 256, igate_mean=-10.0, fgate_mean=4.5),
    "1.4B, 4 heads": ArgSpec(8, 8192, 4, 256, 512, igate_mean=-10.0, fgate_mean=4.5),
    "many small heads": ArgSpec(8, 8192, 32, 64, 128, igate_mean=-10.0, fgate_mean=4.5),
    "one long sequence": ArgSpec(1, 65536, 8, 256, 512, igate_mean=-10.0, fgate_mean=4.5),
}
"""Training shapes for a cluster: 65,536 tokens per device."""
