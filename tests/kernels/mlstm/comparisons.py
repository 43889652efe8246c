"""What the mLSTM computes, whole, by any of its forms, and how far two results are apart."""

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.kernels.mlstm import mlstm

OUTPUTS = ["hidden", "memory", "normalizer"]
INPUTS = ["q", "k", "v", "igate", "fgate", "state.memory", "state.normalizer"]


def drawn(spec, *, with_state=True, reset_rate=0.0):
    """Draw inputs in bfloat16, where documents begin, and gradients of the outputs and of the last state."""
    q, k, v, *gates = spec.arguments(jax.random.key(0))
    inputs = [x.astype(jnp.bfloat16) for x in (q, k, v)] + gates
    state = spec.state(jax.random.key(1)) if with_state else None
    shape = spec.batch_size, spec.length
    resets = jax.random.bernoulli(jax.random.key(2), reset_rate, shape) if reset_rate else None
    dhidden = jax.random.normal(jax.random.key(3), v.shape, jnp.bfloat16)
    dlast = jax.tree.map(lambda x: 0.01 * x, spec.state(jax.random.key(4)))
    return inputs, state, resets, dhidden, dlast._replace(stabilizer=jnp.zeros_like(dlast.stabilizer))


def everything(run, inputs, state, resets, dhidden, dlast):
    """Return outputs and last state, and the gradients of all inputs; forward and backward are programs of their own.

    In one program, XLA drops roundings to bfloat16 that a model has.
    """

    def forward(inputs, state):
        return jax.vjp(lambda inputs, state: run(*inputs, state, resets), inputs, state)

    (hidden, last), backward = jax.jit(forward)(inputs, state)
    cotangents = dhidden.astype(hidden.dtype), jax.tree.map(lambda c, x: c.astype(x.dtype), dlast, last)
    dinputs, dstate = jax.jit(lambda backward, cotangents: backward(cotangents))(backward, cotangents)
    names, gradients = (INPUTS, (*dinputs, *dstate[:2])) if state is not None else (INPUTS[:5], dinputs)
    return named([*OUTPUTS, *names], (hidden, *last[:2], *gradients))


def exact(spec, **options):
    """Compute the reference in float64."""
    inputs, state, resets, dhidden, dlast = drawn(spec, **options)
    with jax.enable_x64(True):
        inputs, state, dhidden, dlast = jax.tree.map(lambda x: x.astype("float64"), (inputs, state, dhidden, dlast))

        def run(q, k, v, igate, fgate, state, resets):
            return mlstm(q, k, v, igate, fgate, state=state, resets=resets, return_state=True, backend="parallel")

        return everything(run, inputs, state, resets, dhidden, dlast)


def computed(spec, backend, **options):
    """Compute all of it by a backend in bfloat16."""

    def run(q, k, v, igate, fgate, state, resets):
        gates = {"state": state, "resets": resets, "return_state": True, "chunk_size": 256}
        return mlstm(q, k, v, igate, fgate, backend=backend, **gates)

    return everything(run, *drawn(spec, **options))


def errors(actual, expected):
    """Return the error of each array and of its worst row, as shares of the norms of a sequence, for each sequence."""
    result = {}
    for name, e in expected.items():
        rows, difference = (_sequences(name, x) for x in (e, actual[name] - e))
        usual = np.sqrt(np.mean(np.sum(rows**2, axis=-1), axis=-1))
        assert not difference[usual == 0].any(), name
        sizes = np.sqrt(np.sum(difference**2, axis=-1))[usual > 0] / usual[usual > 0, None]
        result[name] = np.sqrt(np.mean(sizes**2, axis=-1)), sizes.max(axis=-1)
    return result


def rms(x):
    return np.sqrt(np.mean(x**2))


def _sequences(name, x):
    """Return the rows of each head of each sequence."""
    if name in ("hidden", *INPUTS[:5]):
        x = np.moveaxis(x, 2, 1)  # to batch, heads, positions
    width = 1 if name in ("igate", "fgate", "stabilizer") else x.shape[-1]
    return x.reshape(x.shape[0] * x.shape[1], -1, width)


def named(names, arrays):
    return {name: np.asarray(x, np.float64) for name, x in zip(names, arrays, strict=True)}


def assert_small(actual, expected, limit=1e-2):
    for name, (shares, _) in errors(actual, expected).items():
        assert rms(shares) < limit, f"{name}: {rms(shares):.4f}"
