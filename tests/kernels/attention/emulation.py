"""What cuDNN's packed attention computes from its operands, in plain NumPy and float64, and in place of its calls."""

import json

import jax
import numpy as np


def attend(q, k, v, dout, sees, scale):
    """Return outputs, logs of denominators and gradients of flattened positions, of which some may see nothing."""
    q, k, v, dout = (np.asarray(x, np.float64).reshape(-1, *x.shape[-2:]) for x in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (np.repeat(x, group, axis=1) for x in (k, v))
    scores = np.where(sees, np.einsum("qhd,khd->hqk", q, wide_k) * scale, -np.inf)
    with np.errstate(divide="ignore"):
        log_totals = np.logaddexp.reduce(scores, axis=-1)
    weights = np.exp(scores - np.where(np.isfinite(log_totals), log_totals, 0.0)[..., None])
    out = np.einsum("hqk,khd->qhd", weights, wide_v)
    dweights = np.einsum("qhd,khd->hqk", dout, wide_v)
    dscores = weights * (dweights - np.einsum("qhd,qhd->hq", dout, out)[..., None]) * scale
    dq = np.einsum("hqk,khd->qhd", dscores, wide_k)
    dk, dv = np.einsum("hqk,qhd->khd", dscores, q), np.einsum("hqk,qhd->khd", weights, dout)
    dk, dv = (x.reshape(len(k), k.shape[1], group, -1).sum(axis=2) for x in (dk, dv))
    return out, log_totals, dq, dk, dv


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
        starts, kv_starts = (
            x.ravel()[:num_slots] / np.prod(keys.shape[2:]) for x, keys in ((offsets, q), (kv_offsets, k))
        )
        lengths = lengths.ravel()
        assert len(lengths) == num_slots
        assert lengths.max() <= s
        np.testing.assert_array_equal(lengths, kv_lengths.ravel())
        np.testing.assert_array_equal(starts, kv_starts)
        slot = np.full(b * s, -1)
        for index, (start, length) in enumerate(zip(starts.astype(int), lengths, strict=True)):
            assert np.all(slot[start : start + length] == -1)
            slot[start : start + length] = index
        sees = (slot[:, None] == slot) & (slot[:, None] >= 0)
        sees &= np.tril(np.ones_like(sees)) | (config["mask_type"] == "PADDING")
        dout = others[1] if is_backward else np.zeros_like(q)
        out, log_totals, *gradients = attend(q, k, v, dout, sees, config["fmha_scale"])
        of_slots = np.full((num_slots, heads, s), np.nan)
        for index, (start, length) in enumerate(zip(starts.astype(int), lengths, strict=True)):
            of_slots[index, :, :length] = log_totals[:, start : start + length]
        if is_backward:
            written = ~np.isnan(of_slots)
            np.testing.assert_allclose(others[0][written], of_slots[written], rtol=1e-5, atol=1e-5)
            returned = gradients
        else:
            returned = [out]
        returned = [np.where((slot >= 0)[:, None, None], x, np.nan) for x in returned]
        returned = [x.reshape(b, s, *x.shape[1:]).transpose(0, 2, 1, 3) for x in returned]
        returned += [np.zeros(0)] if is_backward else [of_slots, np.zeros(0)]
        return [x.astype(result.dtype) for x, result in zip(returned, results, strict=True)]

    def call(*operands):
        return jax.pure_callback(on_host, results, *operands)

    return call


def reference(q, k, v, dout, ids, scale, *, causal=True):
    """Return outputs and gradients of attention between equal ids of a row, in float64."""
    rows = []
    for row in range(len(q)):
        sees = ids[row][:, None] == ids[row]
        sees = sees & np.tril(np.ones_like(sees)) if causal else sees
        out, _, *gradients = attend(q[row], k[row], v[row], dout[row], sees, scale)
        rows.append([out, *gradients])
    return [np.stack(x) for x in zip(*rows, strict=True)]
