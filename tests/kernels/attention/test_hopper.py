"""Attention within documents in kernels for Hopper GPUs, where there is none: lowered and simulated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.attention import emulation
from tolerances import assert_close_by_norm

from xlstm_jax.kernels.attention.api import run_mosaic
from xlstm_jax.kernels.attention.documents import document_bounds, number_documents, running_max
from xlstm_jax.kernels.attention.hopper.tiling import HEAD_DIMS, TILINGS, KernelTiling, Tiling
from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX, hopper_unavailable_reason

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
on_a_simulated_gpu = pytest.mark.skipif(
    hopper_unavailable_reason() is None, reason="a Hopper GPU runs the kernels themselves"
)
NARROW = Tiling(KernelTiling(64, 4, 1), KernelTiling(64, 4, 1), KernelTiling(128, 4, 1))
"""Tiles of other widths than those that are chosen, and rows that are loaded late."""
NAMES = "outputs", "gradient of queries", "gradient of keys", "gradient of values"


def ids_of(lengths):
    """Number the documents of rows."""
    return np.array([np.repeat(np.arange(len(row)), row) for row in lengths], np.int32)


def draw(b, s, heads, kv_heads, d):
    """Draw queries, keys, values and a gradient of the outputs."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(b, s, h, d)), jnp.bfloat16) for h in (heads, kv_heads, kv_heads, heads)]


def both(q, k, v, dout, ids, tiling, interpret):
    """Return the outputs of attention and the gradients of its inputs."""
    from xlstm_jax.kernels.attention.hopper.attention import mosaic_attention

    bounds = document_bounds(ids)
    out, backward = jax.vjp(lambda *inputs: mosaic_attention(*inputs, *bounds, tiling, 0.1, interpret), q, k, v)
    return out, *backward(dout)


@needs_mosaic
@on_a_simulated_gpu
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "tiling"),
    [
        ([[100, 56, 100]], 2, 1, 64, None),
        ([[1] * 200 + [184]], 2, 2, 64, NARROW),
        ([[30, 226], [256]], 1, 1, 128, None),
        ([[128, 128, 1, 127], [384]], 2, 1, 128, NARROW),
    ],
)
def test_simulated_kernels_compute_attention_within_documents(monkeypatch, lengths, heads, kv_heads, head_dim, tiling):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    monkeypatch.setattr("xlstm_jax.kernels.mosaic_gpu.schedule.NUM_SMS", 2)  # each has several work items
    ids = ids_of(lengths)
    inputs = draw(*ids.shape, heads, kv_heads, head_dim)
    actual = both(*inputs, jnp.asarray(ids), tiling or TILINGS[head_dim], plgpu.InterpretGPUParams())
    expected = emulation.reference(*inputs, ids, 0.1)
    assert_close_by_norm(dict(zip(NAMES, actual, strict=True)), dict(zip(NAMES, expected, strict=True)), relative=5e-3)


@needs_mosaic
@on_a_simulated_gpu
def test_rows_that_do_not_fill_tiles_are_padded():
    import jax.experimental.pallas.mosaic_gpu as plgpu

    ids = ids_of([[1, 5, 3, 21], [30]])
    *inputs, dout = draw(*ids.shape, 1, 1, 64)
    run = functools.partial(run_mosaic, segment_ids=jnp.asarray(ids), scale=0.1, interpret=plgpu.InterpretGPUParams())
    out, backward = jax.vjp(run, *inputs)
    expected = emulation.reference(*inputs, dout, ids, 0.1)
    assert_close_by_norm(
        dict(zip(NAMES, (out, *backward(dout)), strict=True)), dict(zip(NAMES, expected, strict=True)), relative=5e-3
    )


@needs_mosaic
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_every_tiling_lowers_for_a_gpu(head_dim, kv_heads):
    inputs = jax.eval_shape(lambda: draw(2, 1024, 8, kv_heads, head_dim))
    ids = jax.ShapeDtypeStruct((2, 1024), jnp.int32)
    run = jax.jit(both, static_argnums=(5, 6))
    text = run.trace(*inputs, ids, TILINGS[head_dim], None).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 3


def test_bounds_and_numbers_are_those_of_runs_of_equal_ids():
    ids = ids_of([[3, 1, 40], [44], [20, 24]]) % 2
    starts, ends = document_bounds(jnp.asarray(ids))
    expected = [[[0] * 3 + [3] + [4] * 40, [0] * 44, [0] * 20 + [20] * 24]]
    expected.append([[3] * 3 + [4] + [44] * 40, [44] * 44, [20] * 20 + [44] * 24])
    np.testing.assert_array_equal([starts, ends], expected)
    numbers = [[0] * 3 + [1] + [2] * 40, [3] * 44, [4] * 20 + [5] * 24]
    np.testing.assert_array_equal(number_documents(jnp.asarray(ids)), numbers)


def test_a_running_maximum_is_exact_for_any_position():
    x = np.random.default_rng(0).integers(0, 2**24, (2, 100)).astype(np.int32)
    np.testing.assert_array_equal(running_max(jnp.asarray(x)), np.maximum.accumulate(x, axis=1))
