"""Rotary positions and attention by themselves."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from tolerances import assert_close

from xlstm_jax.kernels.attention import api as kernel
from xlstm_jax.kernels.shared.log_once import log_once
from xlstm_jax.models.llama import attention
from xlstm_jax.models.llama.attention import (
    append,
    apply_rotary_emb,
    cached_attention,
    check_backend,
    empty_cache,
    multihead_attention,
    precompute_freqs,
    segment_mask,
)


def draw(b=2, s=7, hq=6, hk=2, d=4, dtype=jnp.float32):
    """Draw queries, keys and values."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(b, s, h, d)), dtype) for h in (hq, hk, hk)]


def softmax_mean(q, k, v, sees, scale):
    """Attention of one head, in float64."""
    scores = np.where(sees, np.asarray(q, np.float64) @ np.asarray(k, np.float64).T * scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ np.asarray(v, np.float64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("qk_scale", [None, 0.3])
def test_attention_is_a_softmax_mean_of_values_with_scale_one_over_root_head_dim(causal, qk_scale):
    q, k, v = draw()
    segments = jnp.array([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 2]])
    out = multihead_attention(q, k, v, segments, causal, qk_scale)
    sees = np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None, :]
    sees = sees & np.tril(np.ones((7, 7), bool)) if causal else sees
    scale = 1 / np.sqrt(4) if qk_scale is None else qk_scale
    for row in range(2):
        for head in range(6):
            expected = softmax_mean(q[row, :, head], k[row, :, head // 3], v[row, :, head // 3], sees[row], scale)
            assert_close(out[row, :, head], expected)


def test_segments_need_not_be_contiguous_but_runs_are_segments_of_their_own_where_they_are_said_to_be():
    q, k, v = draw()
    scattered, runs = jnp.array([[0, 1, 1, 0, 2, 0, 0]] * 2), jnp.array([[0, 1, 1, 2, 3, 4, 4]] * 2)
    for contiguous, ids in ((False, scattered), (True, runs)):
        out = multihead_attention(q, k, v, scattered, contiguous_segments=contiguous)
        sees = (ids[0][:, None] == ids[0]) & np.tril(np.ones((7, 7), bool))
        assert_close(out[1, :, 4], softmax_mean(q[1, :, 4], k[1, :, 1], v[1, :, 1], sees, 0.5))


def test_attention_within_documents_is_the_same_on_a_mesh():
    q, k, v = draw(b=8)
    ids = jnp.cumsum(jnp.asarray(np.random.default_rng(0).random((8, 7)) < 0.3), axis=1)

    def attend(q, k, v, ids):
        return multihead_attention(q, k, v, ids, backend="auto", contiguous_segments=True)

    mesh, spec = Mesh(np.array(jax.devices()), ("dp",)), PartitionSpec("dp")
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    assert_close(sharded(q, k, v, ids), multihead_attention(q, k, v, ids))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("has_mask", [True, False])
def test_an_odd_length_is_padded_for_cudnn_without_effect(monkeypatch, causal, has_mask):
    q, k, v = draw(s=7)
    mask = segment_mask(jnp.array([[0, 0, 1, 1, 1, 1, 1]] * 2)) if has_mask else None
    expected = kernel.attention(q, k, v, mask, causal=causal, scale=None, backend="xla")
    plain = jax.nn.dot_product_attention

    def on_xla(q, *arguments, implementation, **options):
        assert implementation == "cudnn"
        assert q.shape[1] == 8
        return plain(q, *arguments, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_xla)
    assert_close(kernel.attention(q, k, v, mask, causal=causal, scale=None, backend="cudnn"), expected)


def test_a_segment_mask_is_true_within_segments():
    mask = segment_mask(jnp.array([[0, 0, 1]]))
    np.testing.assert_array_equal(mask[0, 0], [[1, 1, 0], [1, 1, 0], [0, 0, 1]])


def test_attention_to_a_cache_is_attention_to_the_sequence():
    q, k, v = draw()
    cache = empty_cache(2, 9, 2, 4, jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    cache = append(cache, k[:, :5], v[:, :5], positions[:, :5])
    cache = append(cache, k[:, 5:], v[:, 5:], positions[:, 5:])
    assert_close(cached_attention(q[:, 5:], cache), multihead_attention(q, k, v)[:, 5:])


def test_what_lies_in_empty_slots_does_not_matter():
    q, k, v = draw()
    positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
    empty = empty_cache(2, 9, 2, 4, jnp.float32)
    dirty = empty._replace(keys=empty.keys + 1e3, values=empty.values - 1e3)
    clean, dirty = (cached_attention(q, append(cache, k, v, positions)) for cache in (empty, dirty))
    np.testing.assert_array_equal(clean, dirty)


def test_rotary_positions_turn_neighbouring_features_together():
    x = jnp.zeros((1, 3, 1, 4)).at[..., 0].set(1.0)
    turned, _ = apply_rotary_emb(x, x, theta=100.0)
    expected = np.stack([[np.cos(t), np.sin(t), 0, 0] for t in range(3)])
    assert_close(turned[0, :, 0], expected)
    y = jnp.zeros((1, 3, 1, 4)).at[..., 3].set(1.0)
    turned, _ = apply_rotary_emb(y, y, theta=100.0)
    expected = np.stack([[0, 0, -np.sin(t / 10), np.cos(t / 10)] for t in range(3)])
    assert_close(turned[0, :, 0], expected)


def test_rotary_positions_count_along_the_sequence_by_default():
    q, k, _ = draw()
    by_default = apply_rotary_emb(q, k)
    assert_close(apply_rotary_emb(q, k, *precompute_freqs(4, max_length=7)), by_default)
    assert_close(apply_rotary_emb(q, k, *precompute_freqs(4, jnp.tile(jnp.arange(7), (2, 1)))), by_default)


def test_products_of_turned_queries_and_keys_depend_on_distances_only():
    q, k, _ = draw(hk=6)

    def products(shift):
        turned = apply_rotary_emb(q, k, *precompute_freqs(4, jnp.arange(7) + shift))
        return jnp.einsum("bqhd,bkhd->bhqk", *turned)

    assert_close(products(5), products(0))


def test_frequencies_need_positions_or_a_length():
    with pytest.raises(ValueError, match="max_length"):
        precompute_freqs(4)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("pallas_triton", "use 'cudnn' .* or 'xla'"),
        ("flash", "only auto, xla, cudnn, mosaic"),
        ("mosaic", "bfloat16"),
        ("cudnn", "bfloat16"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_a_way_out(backend, message):
    with pytest.raises(ValueError, match=message):
        check_backend(backend, jnp.dtype("float32"), 64)


def test_the_automatic_backend_says_once_what_it_takes(caplog):
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=attention.__name__):
        automatic = [multihead_attention(*draw(), backend="auto") for _ in range(2)][1]
    np.testing.assert_array_equal(automatic, multihead_attention(*draw(), backend="xla"))
    (record,) = caplog.records
    assert record.message.startswith("Attention: XLA, for cuDNN needs a GPU")
    assert record.message.endswith("not cpu, float32 and 4.")


def test_cudnn_needs_a_gpu():
    q, k, v = draw(d=8, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"GPU.*xla"):
        multihead_attention(q, k, v, backend="cudnn")
