"""What cuDNN's packed attention computes from its operands, in plain NumPy and float64, and in place of its calls."""

import json

import jax
import jax.numpy as jnp
import numpy as np


def attend(q, k, v, dout, sees, scale):
    """Return outputs, the log of the sums of exponentials, and gradients of attention over flattened positions."""
    q, k, v, dout = (np.asarray(x, np.float64).reshape(-1, *x.shape[-2:]) for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(sees, np.einsum("qhd,khd->hqk", q, wide_k) * scale, -np.inf)
    highest = scores.max(axis=-1, keepdims=True, initial=-1e300)
    sums = highest[..., 0] + np.log(np.exp(scores - highest).sum(axis=-1))
    weights = np.exp(scores - sums[..., None])
    out = np.einsum("hqk,khd->qhd", weights, wide_v)
    dweights = np.einsum("qhd,khd->hqk", dout, wide_v)
    dscores = weights * (dweights - np.einsum("qhd,qhd->hq", dout, out)[..., None]) * scale
    dq = np.einsum("hqk,khd->qhd", dscores, wide_k)
    dk, dv = np.einsum("hqk,qhd->khd", dscores, q), np.einsum("hqk,qhd->khd", weights, dout)
    dk, dv = (x.reshape(len(k), k.shape[1], group, -1).sum(axis=2) for x in (dk, dv))
    return out, sums, dq, dk, dv


def emulate_call(target, results, *, legacy_backend_config, **layouts):
    """Stand in for `jax.ffi.ffi_call`: what cuDNN leaves unwritten is NaN."""
    del layouts
    config = json.loads(legacy_backend_config)["cudnn_fmha_backend_config"]
    is_backward = target == "__cudnn$fmhaSoftmaxBackward"
    assert is_backward or target == "__cudnn$fmhaSoftmax"

    def on_host(q, k, v, *others):
        *others, lengths, kv_lengths, offsets, kv_offsets = (np.asarray(x) for x in others)
        b, s, heads, _ = q.shape
        num_slots = b * config["max_seg_per_batch"]
        assert lengths.size == num_slots
        np.testing.assert_array_equal(lengths, kv_lengths)
        slot = np.full(b * s, -1)
        for index in range(num_slots):
            start, kv_start = (int(x.ravel()[index]) for x in (offsets, kv_offsets))
            start, rest = divmod(start, np.prod(q.shape[2:]))
            assert rest == 0
            assert kv_start == start * np.prod(k.shape[2:])
            assert np.all(slot[start : start + lengths.ravel()[index]] == -1)
            assert lengths.ravel()[index] <= s
            slot[start : start + lengths.ravel()[index]] = index
        offsets = offsets.ravel()[:num_slots] // np.prod(q.shape[2:])
        sees = (slot[:, None] == slot) & np.tril(np.ones((b * s, b * s), bool)) & (slot[:, None] >= 0)
        dout = others[1] if is_backward else np.zeros_like(q)
        out, sums, *gradients = attend(q, k, v, dout, sees, config["fmha_scale"])
        statistics = np.full((num_slots, heads, s), np.nan)
        for index in range(num_slots):
            length = lengths.ravel()[index]
            statistics[index, :, :length] = sums[:, offsets[index] : offsets[index] + length]
        if is_backward:
            kept = ~np.isnan(statistics)
            np.testing.assert_allclose(others[0][kept], statistics[kept], rtol=1e-2, atol=1e-2)
            returned = [x.reshape(b, s, *x.shape[1:]).transpose(0, 2, 1, 3) for x in gradients]
        else:
            returned = [out.reshape(q.shape).transpose(0, 2, 1, 3), statistics]
        returned.append(np.zeros(0))
        return [x.astype(result.dtype) for x, result in zip(returned, results, strict=True)]

    def call(*operands):
        return jax.pure_callback(on_host, results, *operands)

    return call


def reference(q, k, v, dout, ids, scale):
    """Return outputs and gradients of causal attention between equal ids of a row, in float64."""
    rows = []
    for row in range(len(q)):
        same = ids[row][:, None] == ids[row]
        out, _, *gradients = attend(q[row], k[row], v[row], dout[row], same & np.tril(np.ones_like(same)), scale)
        rows.append([out, *gradients])
    return [jnp.asarray(np.stack(x)) for x in zip(*rows, strict=True)]
