"""The mLSTM token by token in NumPy and float64, with its gradients by hand: independent of the package's code."""

from typing import NamedTuple

import numpy as np

from xlstm_jax.kernels.mlstm import MLSTMState


class Gradients(NamedTuple):
    """The gradients of the inputs, and of the memory and the normaliser before the first token."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    igate: np.ndarray
    fgate: np.ndarray
    memory: np.ndarray
    normalizer: np.ndarray


def recurrence(inputs, dhidden, state=None, dlast=None, *, eps=0.0):
    """Compute the hidden states, the last state and all gradients of `sum(hidden * dhidden) + sum(last * dlast)`.

    Memories are not in units of a stabiliser here, so the logarithms of gates must be moderate. In these units,
    `hidden = memory^T q / (max(|normalizer . q|, 1) + eps exp(stabilizer))`, with
    `stabilizer[t] = max(stabilizer[t-1] + log_forget[t], igate[t])`, whose gradient goes to the larger of both.
    """
    q, k, v, igate, fgate, dhidden = (_time_first(x) for x in (*inputs, dhidden))
    scale, length = q.shape[-1] ** -0.5, len(q)
    log_forget, write = -np.logaddexp(0.0, -fgate), np.exp(igate)
    keep = np.exp(log_forget)
    heads, qk_dim, v_dim = q.shape[1:3], q.shape[-1], v.shape[-1]
    shapes = (*heads, qk_dim, v_dim), (*heads, qk_dim), heads
    memory, normalizer, first = (np.zeros(x) for x in shapes) if state is None else map(_exact, state)
    memories, normalizers = [memory * _over(first, 2)], [normalizer * _over(first, 1)]
    stabilizers, hidden, parts = [first], [], []
    for t in range(length):
        memories.append(keep[t, ..., None, None] * memories[-1] + _outer(write[t, ..., None] * k[t], v[t]))
        normalizers.append(keep[t, ..., None] * normalizers[-1] + write[t, ..., None] * k[t])
        stabilizers.append(np.maximum(stabilizers[-1] + log_forget[t], igate[t]))
        overlap = scale * _dot(q[t], normalizers[-1])
        divisor = np.maximum(np.abs(overlap), 1.0) + eps * np.exp(stabilizers[-1])
        hidden.append(scale * np.einsum("bhk,bhkv->bhv", q[t], memories[-1]) / divisor[..., None])
        parts.append((np.sign(overlap) * (np.abs(overlap) > 1.0), divisor))

    last = stabilizers[-1]
    dmemory, dnormalizer = np.zeros(shapes[0]), np.zeros(shapes[1])
    if dlast is not None:
        dmemory, dnormalizer = _exact(dlast.memory) * _over(-last, 2), _exact(dlast.normalizer) * _over(-last, 1)
    dstabilizer, gradients = np.zeros(heads), [np.zeros_like(x) for x in (q, k, v, igate, fgate)]
    dq, dk, dv, digate, dfgate = gradients
    for t in reversed(range(length)):
        sign, divisor = parts[t]
        dnumerator, ddivisor = dhidden[t] / divisor[..., None], -_dot(hidden[t], dhidden[t]) / divisor
        doverlap = sign * ddivisor
        dq[t] = scale * np.einsum("bhkv,bhv->bhk", memories[t + 1], dnumerator)
        dq[t] += scale * doverlap[..., None] * normalizers[t + 1]
        dmemory = dmemory + scale * _outer(q[t], dnumerator)
        dnormalizer = dnormalizer + scale * doverlap[..., None] * q[t]
        dstabilizer = dstabilizer + ddivisor * eps * np.exp(stabilizers[t + 1])
        is_new = igate[t] > stabilizers[t] + log_forget[t]
        written = np.einsum("bhkv,bhv->bhk", dmemory, v[t]) + dnormalizer
        dk[t] = write[t, ..., None] * written
        dv[t] = write[t, ..., None] * np.einsum("bhkv,bhk->bhv", dmemory, k[t])
        digate[t] = write[t] * _dot(k[t], written) + is_new * dstabilizer
        dkeep = np.sum(dmemory * memories[t], axis=(-2, -1)) + _dot(dnormalizer, normalizers[t])
        dfgate[t] = (dkeep * keep[t] + ~is_new * dstabilizer) / (1 + np.exp(fgate[t]))
        dmemory, dnormalizer = keep[t, ..., None, None] * dmemory, keep[t, ..., None] * dnormalizer
        dstabilizer = ~is_new * dstabilizer
    end = MLSTMState._make([memories[-1] * _over(-last, 2), normalizers[-1] * _over(-last, 1), last])
    dinputs = [np.moveaxis(x, 0, 1) for x in gradients]
    dstate = [dmemory * _over(first, 2), dnormalizer * _over(first, 1)]
    return np.stack(hidden, axis=1), end, Gradients._make(dinputs + dstate)


def _exact(x):
    return np.asarray(x, np.float64)


def _time_first(x):
    return np.moveaxis(_exact(x), 1, 0)


def _over(exponent, num_axes):
    return np.exp(exponent).reshape(*exponent.shape, *[1] * num_axes)


def _outer(x, y):
    return x[..., :, None] * y[..., None, :]


def _dot(x, y):
    return np.sum(x * y, axis=-1)
