"""Attention within documents, computed by a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close_by_norm

from xlstm_jax.kernels.attention.api import document_attention, mosaic_problem, packed_problem
from xlstm_jax.kernels.attention.documents import number_documents
from xlstm_jax.kernels.attention.packed import choose_slots, packed_attention

SMALL = jax.ShapeDtypeStruct((2, 64, 4, 64), jnp.bfloat16)
HAS_PACKED = jax.default_backend() == "gpu" and packed_problem(SMALL, SMALL) is None
HAS_MOSAIC = mosaic_problem("bfloat16", 64) is None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_PACKED, reason="there is no GPU with cuDNN's packed layout"),
]
of_mosaic = pytest.mark.skipif(not HAS_MOSAIC, reason="there is no Hopper GPU")

NAMES = "outputs", "gradient of queries", "gradient of keys", "gradient of values"
LAYOUTS = {
    "one document a row": lambda length: [[length]] * 2,
    "several documents": lambda length: [[length // 3, 1, length - length // 3 - 1], [7, length - 7]],
    "short documents": lambda length: [[5] * (length // 5) + [length % 5] * (length % 5 > 0), [length]],
    "every position is a document": lambda length: [[1] * length, [length]],
}


def draw(length, heads, kv_heads, head_dim):
    """Draw queries, keys, values and a gradient of the outputs; they are numbers of bfloat16."""
    generator, numbers = np.random.default_rng(0), (heads, kv_heads, kv_heads, heads)
    drawn = [generator.normal(size=(2, length, count, head_dim)) for count in numbers]
    return [jnp.asarray(x, jnp.bfloat16) for x in drawn]


def plain(q, k, v, ids, causal):
    """Return attention in plain JAX."""
    mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    with jax.default_matmul_precision("highest"):
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal, scale=0.2, implementation="xla")


def by_cudnn(q, k, v, ids, causal):
    """Return attention by cuDNN."""
    return packed_attention(q, k, v, number_documents(ids), causal, 0.2, choose_slots(*q.shape))


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(attend, causal, q, k, v, dout, ids):
    """Return the outputs of attention and the gradients of its inputs."""
    out, backward = jax.vjp(lambda *inputs: attend(*inputs, ids, causal), q, k, v)
    return dict(zip(NAMES, (out, *backward(dout)), strict=True))


def by_mosaic(q, k, v, ids, causal):
    """Return attention by the kernels for Hopper GPUs."""
    return document_attention(q, k, v, ids, causal=causal, scale=0.2, backend="mosaic")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("attend", "causal", "length", "heads", "kv_heads", "head_dim"),
    [
        (by_cudnn, True, 1024, 4, 4, 64),
        (by_cudnn, True, 1024, 8, 2, 128),
        (by_cudnn, False, 515, 4, 1, 64),
        (by_cudnn, True, 77, 3, 3, 48),
        pytest.param(by_mosaic, True, 1024, 4, 4, 64, marks=of_mosaic),
        pytest.param(by_mosaic, True, 2048, 8, 2, 128, marks=of_mosaic),
        pytest.param(by_mosaic, True, 515, 4, 1, 64, marks=of_mosaic),
        pytest.param(by_mosaic, True, 77, 3, 3, 128, marks=of_mosaic),
    ],
)
def test_values_and_gradients_are_those_of_plain_jax_in_float32(
    layout, attend, causal, length, heads, kv_heads, head_dim
):
    ids = jnp.array([np.repeat(np.arange(len(row)), row) for row in LAYOUTS[layout](length)], jnp.int32)
    inputs = draw(length, heads, kv_heads, head_dim)
    expected = run(plain, causal, *(x.astype(jnp.float32) for x in inputs), ids)
    actual = run(attend, causal, *inputs, ids)
    # Where documents have one position, gradients of queries and keys are zero.
    at_least = np.linalg.norm(np.asarray(expected["gradient of values"], np.float64))
    assert_close_by_norm(actual, expected, relative=1e-2, at_least=1e-1 * at_least)
