"""Llama in NumPy and float64, head by head, to compare the model with."""

import numpy as np


def llama_logits(params, tokens, config, positions=None, segments=None):
    """Compute the logits of `[batch, length]` tokens from the parameters of unrolled blocks."""
    params = _to_float64(params)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segments = np.zeros(tokens.shape, int) if segments is None else segments
    rows = [_row(params, *row, config) for row in zip(tokens, positions, segments, strict=True)]
    return np.stack(rows)


def _row(params, tokens, positions, segments, config):
    embedding = params["token_embedding"]["embedding"]
    x = embedding[tokens]
    for index in range(config.num_blocks):
        block = params["block_stack"][f"block_{index}"]
        x = x + _attention(block["attn"], x, positions, segments, config)
        x = x + _feed_forward(block["ffn"], x, config)
    head = params["lm_head"]
    x = _rms_norm(head["out_norm"], x, config.norm_eps)
    logits = x @ (embedding.T if config.tie_weights else head["out_dense"]["kernel"])
    cap = config.logits_soft_cap
    return logits if cap is None else cap * np.tanh(logits / cap)


def _attention(params, x, positions, segments, config):
    x = _rms_norm(params["pre_norm"], x, config.norm_eps)
    length, d = x.shape[0], config.head_dim
    q, k, v = (_dense(params[name], x).reshape(length, -1, d) for name in "qkv")
    if config.qk_norm:
        q = _rms_norm(params["q_norm"], q, config.norm_eps)
        k = _rms_norm(params["k_norm"], k, config.norm_eps)
    group_size = q.shape[1] // k.shape[1]
    sees = segments[:, None] == segments[None, :]
    if config.causal:
        sees = sees & (np.arange(length)[:, None] >= np.arange(length)[None, :])
    heads = []
    for head in range(q.shape[1]):
        own_q = _rotate(q[:, head], positions, config.theta)
        own_k = _rotate(k[:, head // group_size], positions, config.theta)
        scores = np.where(sees, own_q @ own_k.T / np.sqrt(d), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, head // group_size])
    return _dense(params["out"], np.concatenate(heads, axis=1))


def _rotate(x, positions, theta):
    """Turn pairs of features as complex numbers."""
    numbers = x[:, 0::2] + 1j * x[:, 1::2]
    frequencies = np.array([theta ** (-2 * pair / x.shape[1]) for pair in range(x.shape[1] // 2)])
    numbers = numbers * np.exp(1j * np.outer(positions, frequencies))
    return np.stack([numbers.real, numbers.imag], axis=-1).reshape(x.shape)


def _feed_forward(params, x, config):
    x = _rms_norm(params["pre_norm"], x, config.norm_eps)
    gate = _dense(params["gate"], x)
    return _dense(params["down"], gate / (1 + np.exp(-gate)) * _dense(params["up"], x))


def _dense(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def _rms_norm(params, x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * params["scale"]


def _to_float64(tree):
    return {k: _to_float64(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()}
