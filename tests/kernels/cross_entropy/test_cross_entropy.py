"""The cross-entropy over a vocabulary: in plain JAX, and in kernels for Hopper GPUs, lowered and simulated anywhere."""

import functools
import logging
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.kernels.cross_entropy import api, plain
from xlstm_jax.kernels.cross_entropy.tiling import ENOUGH, MAX_SPLITS, MULTIPLE_OF_TOKENS, NUM_CLUSTERS, num_splits
from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX, hopper_unavailable_reason
from xlstm_jax.kernels.shared.log_once import log_once

pytestmark = pytest.mark.slow

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
on_a_simulated_gpu = pytest.mark.skipif(
    hopper_unavailable_reason() is None, reason="a Hopper GPU runs the kernels themselves"
)
NAMES = ["loss", "largest", "dx", "dkernel"]


def drawn(num_tokens, num_features, vocab_size, *, dtype=jnp.bfloat16):
    """Draw features, a kernel, targets of which some are in no part of the vocabulary, and gradients of losses."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (num_tokens, num_features), dtype)
    kernel = 2.0 * num_features**-0.5 * jax.random.normal(keys[1], (num_features, vocab_size))
    targets = jax.random.randint(keys[2], (num_tokens,), -vocab_size // 4, vocab_size)
    return x, kernel, targets, jax.random.normal(keys[3], (num_tokens,))


def exact(x, kernel, targets, dlosses, cap):
    """Compute losses, largest logits and gradients in float64, by differentiation."""
    with jax.enable_x64(True):
        x, kernel, dlosses = (jnp.asarray(y, jnp.float64) for y in (x, kernel, dlosses))

        def losses(x, kernel):
            logits = x @ kernel
            logits = logits if cap is None else cap * jnp.tanh(logits / cap)
            hot = jax.nn.one_hot(targets, kernel.shape[1])
            return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1), jnp.max(logits, axis=-1)

        values, backward, largest = jax.vjp(losses, x, kernel, has_aux=True)
        return dict(zip(NAMES, (values, largest, *backward(dlosses)), strict=True))


def put_together(sums, gradients, x, kernel, targets, dlosses):
    """Compute the same from the two halves."""
    (largest, totals, target_logits, *_), kept = sums(x, kernel, targets)
    log_totals = jnp.log(totals) + largest
    results = log_totals - target_logits, largest, *gradients(x, kernel, targets, log_totals, dlosses, kept)
    return dict(zip(NAMES, results, strict=True))


def in_plain_jax(x, kernel, targets, dlosses, *, keep_logits=False, **options):
    sums, gradients = (functools.partial(f, **options) for f in (plain.vocabulary_sums, api.gradients))
    sums = functools.partial(sums, keep_logits=keep_logits)
    return put_together(sums, gradients, x, kernel, targets, dlosses)


def assert_near(actual, expected, limit):
    for name in NAMES:
        a, e = (np.asarray(x[name], np.float64) for x in (actual, expected))
        error = np.linalg.norm(a - e) / np.linalg.norm(e)
        assert error < limit, f"{name}: {error:.2e}"


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("keep_logits", [False, True])
@pytest.mark.parametrize("tokens_per_chunk", [7, 16, 1000])
def test_plain_jax_computes_losses_and_gradients(cap, keep_logits, tokens_per_chunk):
    arrays = drawn(48, 24, 300, dtype=jnp.float32)
    options = {"cap": cap, "tokens_per_chunk": tokens_per_chunk, "keep_logits": keep_logits}
    with jax.default_matmul_precision("float32"):  # GPUs round such products by default
        actual = in_plain_jax(*arrays, dtype=jnp.float32, **options)
    assert_near(actual, exact(*arrays, cap), 1e-5)


@pytest.mark.parametrize("size", [1.0, 15.0])
def test_kept_logits_round_gradients_hardly_more_than_bfloat16_does(size):
    x, kernel, targets, dlosses = drawn(512, 64, 1024)
    arrays = size * x, kernel.astype(jnp.bfloat16).astype(jnp.float32), targets, dlosses  # logits of 2 or 30
    expected = exact(*arrays, None)
    options = {"dtype": jnp.bfloat16, "cap": None, "tokens_per_chunk": 512}
    for name in ("dx", "dkernel"):
        kept, computed_again = (
            np.linalg.norm(np.asarray(results[name], np.float64) - np.asarray(expected[name], np.float64))
            for results in (in_plain_jax(*arrays, keep_logits=keep, **options) for keep in (True, False))
        )
        assert kept < 1.02 * computed_again, f"{name}: {kept:.3e} instead of {computed_again:.3e}"


@pytest.mark.parametrize("cap", [None, 1e6])
def test_logits_far_below_all_others_may_be_kept(cap):
    x, kernel, targets, dlosses = drawn(16, 8, 300)
    arrays = 1e4 * x, kernel, targets, dlosses  # of which some are beyond the range of float16
    options = {"dtype": jnp.bfloat16, "cap": cap, "tokens_per_chunk": 16}
    kept, computed_again = (in_plain_jax(*arrays, keep_logits=keep, **options) for keep in (True, False))
    assert_near(kept, {name: np.asarray(x, np.float64) for name, x in computed_again.items()}, 1e-2)


def test_the_kernel_s_gradient_does_not_suffer_from_many_chunks_in_bfloat16():
    arrays = drawn(4096, 32, 64)
    narrow = arrays[0], arrays[1].astype(jnp.bfloat16).astype(jnp.float32), *arrays[2:]
    expected = exact(*narrow, None)
    errors = []
    for tokens_per_chunk in (8, 4096):
        actual = in_plain_jax(*arrays, dtype=jnp.bfloat16, cap=None, tokens_per_chunk=tokens_per_chunk)
        errors.append(np.linalg.norm(np.asarray(actual["dkernel"], np.float64) - np.asarray(expected["dkernel"])))
    assert errors[0] < 1.1 * errors[1]


@needs_mosaic
@on_a_simulated_gpu
# Tiles of 256 logits: two in one walk; two in each of two walks, of which the last is not full.
@pytest.mark.parametrize(
    ("vocab_size", "splits", "cap", "keep_logits"), [(512, 1, 3.0, False), (832, 2, None, False), (832, 2, 3.0, True)]
)
def test_simulated_kernels_compute_losses_and_gradients(vocab_size, splits, cap, keep_logits, monkeypatch):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.cross_entropy import hopper

    x, kernel, targets, dlosses = drawn(256, 128, vocab_size)
    kernel = kernel.astype(jnp.bfloat16)
    monkeypatch.setattr(hopper, "num_splits", lambda _: splits)
    options = {"cap": cap, "interpret": plgpu.InterpretGPUParams()}

    def gradients(x, kernel, *rest):
        *rest, kept = rest
        if kept is None:
            dlogits = hopper.logit_gradients(x, kernel, *rest, **options)
        else:
            dlogits = plain.logit_gradients(plain.restored(kept), *rest, cap=cap).astype(jnp.bfloat16)
        x, kernel, dlogits = (y.astype(jnp.float32) for y in (x, kernel, dlogits))
        return dlogits @ kernel.T, x.T @ dlogits

    sums = functools.partial(hopper.vocabulary_sums, keep_logits=keep_logits, **options)
    actual = put_together(sums, gradients, x, kernel, targets, dlosses)
    expected = exact(x, kernel, targets, dlosses, cap)
    assert_near(
        {name: actual[name] for name in NAMES[:2]} | {name: expected[name] for name in NAMES[2:]}, expected, 1e-5
    )
    assert_near(actual, expected, 3e-3)


@needs_mosaic
@pytest.mark.parametrize(
    ("num_features", "vocab_size", "keep_logits"), [(64, 50304, False), (768, 50240, True), (4096, 32000, False)]
)
def test_kernels_lower_for_a_gpu(num_features, vocab_size, keep_logits):
    from xlstm_jax.kernels.cross_entropy import hopper

    x, kernel, targets, dlosses = jax.eval_shape(functools.partial(drawn, 1024, num_features, vocab_size))
    kernel = jax.ShapeDtypeStruct(kernel.shape, jnp.bfloat16)

    def run(x, kernel, targets, dlosses):
        (largest, totals, _), kept = hopper.vocabulary_sums(x, kernel, targets, cap=30.0, keep_logits=keep_logits)
        return kept, hopper.logit_gradients(x, kernel, targets, jnp.log(totals) + largest, dlosses, cap=30.0)

    lowered = jax.jit(run).trace(x, kernel, targets, dlosses).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") >= 2


@pytest.mark.gpu
@pytest.mark.parametrize(("num_features", "vocab_size"), [(768, 50304), (2048, 32064)])
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("keep_logits", [False, True])
def test_kernels_are_as_exact_as_plain_jax(num_features, vocab_size, cap, keep_logits, monkeypatch):
    arrays = drawn(2048, num_features, vocab_size)
    options = {"dtype": jnp.bfloat16, "cap": cap, "tokens_per_chunk": 1024}
    sums, gradients = (functools.partial(f, **options) for f in (api.vocabulary_sums, api.gradients))
    sums = functools.partial(sums, keep_logits=keep_logits)
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    assert api.fused_problem(1024, *arrays[1].shape, jnp.bfloat16) is None
    fused = jax.jit(functools.partial(put_together, sums, gradients))(*arrays)
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: "not here")
    usual = jax.jit(functools.partial(in_plain_jax, **options))(*arrays)
    with jax.default_matmul_precision("highest"):
        narrow = arrays[0].astype(jnp.float32), arrays[1].astype(jnp.bfloat16).astype(jnp.float32), *arrays[2:]
        expected = jax.jit(functools.partial(in_plain_jax, **options | {"dtype": jnp.float32}))(*narrow)
    for name in NAMES:
        distances = [
            np.linalg.norm(np.asarray(results[name], np.float64) - np.asarray(expected[name], np.float64))
            for results in (fused, usual)
        ]
        size = np.linalg.norm(np.asarray(expected[name], np.float64))
        assert distances[0] < 1.5 * distances[1] + 1e-6 * size, f"{name}: {distances[0] / size:.2e}"


@pytest.mark.parametrize(
    ("num_tokens", "splits"), [(256, 8), (1024, 8), (4096, 4), (8192, 2), (16384, 1), (32768, 1), (65536, 1)]
)
def test_the_vocabulary_is_cut_until_a_gpu_is_full(num_tokens, splits):
    clusters = num_tokens // MULTIPLE_OF_TOKENS * splits
    assert num_splits(num_tokens) == splits
    assert splits == MAX_SPLITS or clusters / (NUM_CLUSTERS * -(-clusters // NUM_CLUSTERS)) >= ENOUGH


def test_the_kernels_get_no_target_in_the_padding_of_the_vocabulary(monkeypatch):
    seen = []

    def vocabulary_sums(x, kernel, targets, **options):
        seen.append(np.asarray(targets).tolist())
        logits = np.float32([3.0, 1.0, 3.0, 3.0, 3.0])
        return (jnp.full(5, 3.0), jnp.ones(5), jnp.where(targets >= 0, logits, 0.0)), None

    name = "xlstm_jax.kernels.cross_entropy.hopper"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(vocabulary_sums=vocabulary_sums))
    monkeypatch.setattr("xlstm_jax.kernels.cross_entropy.hopper", sys.modules[name], raising=False)
    monkeypatch.setattr(api, "fused_problem", lambda *_: None)
    targets = jnp.array([0, 1, 64, -100, 63])
    options = {"dtype": jnp.bfloat16, "cap": None, "tokens_per_chunk": 5}
    sums, _ = api.vocabulary_sums(jnp.ones((5, 8)), jnp.ones((8, 64)), targets, **options)
    assert seen == [[0, 1, -1, -1, 63]]
    assert sums.best.tolist() == [0, 64, 64, 64, 63]


def test_the_loss_says_once_how_it_is_computed(caplog, monkeypatch):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: "this GPU is older")
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger=api.LOGGER.name):
        for _ in range(2):
            in_plain_jax(*drawn(8, 4, 6), dtype=jnp.bfloat16, cap=None, tokens_per_chunk=8)
    assert [record.message for record in caplog.records] == ["Loss: plain JAX, as this GPU is older."]


@pytest.mark.parametrize(
    ("num_tokens", "shape", "dtype", "words"),
    [
        (1024, (64, 512), jnp.float32, "bfloat16, not in float32"),
        (1000, (64, 512), jnp.bfloat16, "256 tokens, not 1000"),
        (1024, (96, 512), jnp.bfloat16, "64 features, not 96"),
        (1024, (64, 50257), jnp.bfloat16, "64 logits of a token, not 50257"),
    ],
)
def test_what_no_kernel_fits_is_computed_in_plain_jax(num_tokens, shape, dtype, words, monkeypatch):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    problem = api.fused_problem(num_tokens, *shape, dtype)
    assert problem is not None
    assert words in problem
