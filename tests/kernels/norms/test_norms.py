"""Norms: exact, as they were in plain JAX, and in kernels for Hopper GPUs that are lowered and simulated everywhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX, hopper_unavailable_reason
from xlstm_jax.kernels.norms import api, gated_head_norm, reference, rms_norm, rms_norm_with_skip, tiling
from xlstm_jax.models.shared.norms import MultiHeadNorm, RMSNorm

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
simulates = pytest.mark.skipif(
    hopper_unavailable_reason() is None or jax.__version_info__ < NEEDED_JAX,
    reason="there is a Hopper GPU, or no simulation of one",
)

EPS = 1e-6
WIDTHS = [64, 128, 192, 384, 640, 768, 1024, 1152, 1280, 2048, 2304, 3072, 4096]
HEAD_DIMS = [64, 128, 192, 256, 512, 1024]
RMS, GATED = ["y", "dx", "dscale"], ["y", "dhidden", "dgate", "dscale"]


def draw(seed, *shapes, dtype="bfloat16"):
    """Draw numbers that are not centred, as the statistics have to see."""
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.standard_normal(shape) * 1.5 + 0.3, dtype) for shape in shapes]


def rms_inputs(rows, width):
    """Draw features and gradients of their norm; the scale is float32."""
    x, dy, scale = draw(0, (rows, width), (rows, width), (width,))
    return [x, scale.astype(jnp.float32)], [dy]


def gated_inputs(rows, num_heads, width):
    """Draw features of heads, gates and gradients of the outputs; the scale is float32."""
    flat = rows, num_heads * width
    hidden, gate, dy, scale = draw(0, (rows, num_heads, width), flat, flat, flat[1:])
    return [hidden, gate, scale.astype(jnp.float32)], [dy]


def everything(names, function, inputs, cotangents):
    """Return outputs and gradients; forward and backward are programs of their own, as in a model."""
    outputs, backward = jax.jit(lambda *inputs: jax.vjp(function, *inputs))(*inputs)
    leaves, structure = jax.tree.flatten(outputs)
    cotangents = [c.astype(y.dtype) for c, y in zip(cotangents, leaves, strict=True)]
    gradients = jax.jit(lambda backward, c: backward(c))(backward, jax.tree.unflatten(structure, cotangents))
    return {name: np.asarray(x, np.float64) for name, x in zip(names, (*leaves, *gradients), strict=True)}


def exact(names, function, inputs, cotangents):
    """Compute the definition in float64."""
    with jax.enable_x64(True):
        return everything(names, function, *jax.tree.map(lambda x: jnp.asarray(x, "float64"), (inputs, cotangents)))


def defined_rms_norm(x, scale):
    return scale * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)


def defined_gated_head_norm(hidden, gate, scale):
    normed = (hidden - hidden.mean(axis=-1, keepdims=True)) / jnp.sqrt(hidden.var(axis=-1, keepdims=True) + EPS)
    return scale * normed.reshape(gate.shape) / (1 + jnp.exp(-gate))


def errors(actual, expected):
    """Return the error of each array as a share of its norm."""
    return {name: np.linalg.norm(actual[name] - e) / np.linalg.norm(e) for name, e in expected.items()}


def assert_small(actual, expected, limit=2.5e-3):
    """Accept the error of one rounding to bfloat16, and next to none in sums, which stay in float32."""
    for name, error in errors(actual, expected).items():
        assert error < (1e-5 if name == "dscale" else limit), f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_norms_are_what_their_definitions_say(dtype):
    limit = 3e-6 if dtype == "float32" else 1e-2
    for names, function, definition, inputs in (
        (RMS, rms_norm, defined_rms_norm, rms_inputs(10, 24)),
        (GATED, gated_head_norm, defined_gated_head_norm, gated_inputs(10, 3, 24)),
    ):
        inputs = jax.tree.map(lambda x: x.astype(dtype), inputs)
        actual = everything(names, functools.partial(function, eps=EPS), *inputs)
        for name, error in errors(actual, exact(names, definition, *inputs)).items():
            assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_norms_are_bit_by_bit_those_that_models_were_trained_with(dtype):
    (x, scale), _ = jax.tree.map(lambda x: x.astype(dtype), rms_inputs(10, 96))
    (hidden, gate, head_scale), _ = jax.tree.map(lambda x: x.astype(dtype), gated_inputs(10, 3, 40))

    def compose_rms(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPS)
        return wide.astype(x.dtype) * scale.astype(x.dtype)

    def compose_gated(hidden, gate, scale):
        wide = hidden.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPS)
        normed = wide.astype(hidden.dtype).reshape(gate.shape) * scale.astype(hidden.dtype)
        return jax.nn.sigmoid(gate) * normed

    cases = (rms_norm, compose_rms, (x, scale)), (gated_head_norm, compose_gated, (hidden, gate, head_scale))
    for function, compose, inputs in cases:
        with jax.disable_jit():
            actual, backward = jax.vjp(functools.partial(function, eps=EPS), *inputs)
            expected, expected_backward = jax.vjp(compose, *inputs)
            pairs = zip((actual, *backward(actual)), (expected, *expected_backward(expected)), strict=True)
        assert all((a == e).all() for a, e in pairs)


def test_features_that_skip_a_norm_are_as_they_were_and_gradients_add_up():
    (x, scale), (dy,) = jax.tree.map(lambda x: x.astype("float32"), rms_inputs(10, 24))
    (skip, normed), backward = jax.vjp(functools.partial(rms_norm_with_skip, eps=EPS), x, scale)
    assert (skip == x).all()
    alone, backward_alone = jax.vjp(functools.partial(rms_norm, eps=EPS), x, scale)
    assert (normed == alone).all()
    np.testing.assert_allclose(backward((2 * dy, dy))[0], 2 * dy + backward_alone(dy)[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", [*WIDTHS, 256, 320, 512, 896, 1536, 2560])
def test_a_tile_is_spread_over_all_threads_of_a_block(width):
    tile = tiling.choose_tiling(width)
    assert tile is not None
    columns = tile.warps * tile.lanes * tile.vector
    assert width % columns == 0
    assert tile.rows * tile.warps * tile.lanes % (tiling.WARPS * tiling.LANES) == 0
    assert tile.numbers <= tiling.MAX_NUMBERS


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((65536, 1, 768), None),
        ((65536, 6, 128), None),
        ((65536, 1, 4096), None),
        ((65536, 1, 100), "and this is 100"),
        ((65536, 1, 8192), "and this is 8192"),
        ((65536, 4, 2048), "heads of at most 1024"),
        ((65537, 6, 128), "a multiple of 16 rows"),
        ((64, 1, 768), "leave multiprocessors idle"),
        ((2**20, 1, 4096), "less than 2,147,483,648"),
    ],
)
def test_a_shape_that_kernels_do_not_take_is_told_why(shape, problem):
    said = tiling.shape_problem(*shape)
    assert said is None if problem is None else problem in said


def test_kernels_are_for_bfloat16_on_a_gpu(monkeypatch):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    assert api.fused_problem(65536, 1, 768, "bfloat16") is None
    assert "float32" in str(api.fused_problem(65536, 1, 768, "bfloat16", "float32"))
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: "there is none")
    assert api.fused_problem(65536, 1, 768, "bfloat16") == "there is none"


def lowered(function, inputs, cotangents):
    """Return the program of outputs and gradients for a GPU, which need not be there."""

    def run(inputs, cotangents):
        outputs, backward = jax.vjp(function, *inputs)
        return outputs, backward(cotangents)

    return jax.jit(run).trace(inputs, cotangents).lower(lowering_platforms=("cuda",)).as_text()


@needs_mosaic
@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_rms_norm_is_lowered_to_a_kernel_each_way(width, with_skip, monkeypatch):
    monkeypatch.setattr(api, "fused_problem", lambda *_: None)
    inputs, (dy,) = jax.eval_shape(lambda: rms_inputs(4096, width))
    function, cotangents = (rms_norm_with_skip, (dy, dy)) if with_skip else (rms_norm, dy)
    text = lowered(functools.partial(function, eps=EPS), inputs, cotangents)
    assert text.count("custom_call @mosaic_gpu") == 2


@needs_mosaic
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_the_gated_head_norm_is_lowered_to_a_kernel_each_way(width, monkeypatch):
    monkeypatch.setattr(api, "fused_problem", lambda *_: None)
    inputs, (dy,) = jax.eval_shape(lambda: gated_inputs(2048, 3, width))
    text = lowered(functools.partial(gated_head_norm, eps=EPS), inputs, dy)
    assert text.count("custom_call @mosaic_gpu") == 2


@needs_mosaic
def test_models_take_the_kernels(monkeypatch):
    monkeypatch.setattr(api, "fused_problem", lambda *_: None)
    x = jax.ShapeDtypeStruct((4, 1024, 768), "bfloat16")
    hidden = jax.ShapeDtypeStruct((4, 1024, 6, 128), "bfloat16")
    norm, head_norm = RMSNorm(), MultiHeadNorm("tp")

    def init(x, hidden):
        key = jax.random.key(0)
        return norm.init(key, x), head_norm.init(key, hidden)

    def run(params, x, hidden):
        gated = head_norm.apply(params[1], hidden, norm.apply(params[0], x), method="gated")
        return norm.apply(params[0], gated, method="with_skip")

    params = jax.eval_shape(init, x, hidden)
    text = jax.jit(run).trace(params, x, hidden).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.fixture
def small_gpu(monkeypatch):
    """Simulate a GPU of one multiprocessor, whose blocks have several tiles each; return how."""
    from xlstm_jax.kernels.mosaic_gpu.pallas import plgpu

    monkeypatch.setattr(tiling, "NUM_SMS", 1)
    return plgpu.InterpretGPUParams()


# Rows of several lanes, of a warp, of two warps and of four; the last blocks have fewer tiles than the first.
@simulates
@pytest.mark.parametrize(("rows", "width"), [(136, 256), (28, 768), (18, 1152), (9, 2048)])
def test_a_simulated_rms_norm_is_exact_but_for_one_rounding(rows, width, small_gpu):
    from xlstm_jax.kernels.norms import hopper

    inputs = rms_inputs(rows, width)
    actual = everything(RMS, lambda *inputs: hopper.rms_norm(*inputs, EPS, small_gpu), *inputs)
    assert_small(actual, exact(RMS, defined_rms_norm, *inputs))


@simulates
@pytest.mark.parametrize(("rows", "width"), [(72, 256), (5, 2048)])
def test_a_simulated_rms_norm_adds_the_gradients_of_what_skips_it(rows, width, small_gpu):
    from xlstm_jax.kernels.norms import hopper

    inputs, cotangents = rms_inputs(rows, width)
    cotangents = [*draw(1, (rows, width)), *cotangents]
    actual = everything(
        ["skip", *RMS], lambda *inputs: hopper.rms_norm_with_skip(*inputs, EPS, small_gpu), inputs, cotangents
    )
    expected = exact(["skip", *RMS], lambda x, scale: (x, defined_rms_norm(x, scale)), inputs, cotangents)
    assert_small(actual, expected)


@simulates
def test_mapped_norms_are_separate_ones(small_gpu):
    from xlstm_jax.kernels.norms import hopper

    x, scale, dy = draw(0, (3, 24, 256), (3, 256), (3, 24, 256))

    def computed(x, scale, dy):
        y, backward = jax.vjp(lambda x, scale: hopper.rms_norm(x, scale, EPS, small_gpu), x, scale)
        return y, *backward(dy)

    arguments = x, scale.astype(jnp.float32), dy
    mapped = jax.jit(jax.vmap(computed))(*arguments)
    separate = [jax.jit(computed)(*(a[row] for a in arguments)) for row in range(3)]
    jax.tree.map(np.testing.assert_array_equal, mapped, jax.tree.map(lambda *rows: jnp.stack(rows), *separate))


@simulates
@pytest.mark.parametrize(("rows", "num_heads", "width"), [(160, 2, 64), (80, 3, 128), (40, 2, 256), (10, 2, 1024)])
def test_a_simulated_gated_head_norm_is_exact_but_for_one_rounding(rows, num_heads, width, small_gpu):
    from xlstm_jax.kernels.norms import hopper

    inputs, cotangents = gated_inputs(rows, num_heads, width)

    def run(hidden, gate, scale):
        gate, scale = gate.reshape(hidden.shape), scale.reshape(hidden.shape[1:])
        y: Any = hopper.gated_head_norm(hidden, gate, scale, EPS, small_gpu)
        return y.reshape(rows, -1)

    assert_small(everything(GATED, run, inputs, cotangents), exact(GATED, defined_gated_head_norm, inputs, cotangents))


def assert_as_good_as_plain(names, function, plain, definition, inputs, cotangents):
    expected = exact(names, definition, inputs, cotangents)
    actual, usual = (
        errors(everything(names, functools.partial(f, eps=EPS), inputs, cotangents), expected)
        for f in (function, plain)
    )
    for name, error in actual.items():
        assert error <= 1.5 * usual[name] + 1e-6, f"{name}: {error:.1e}, and {usual[name]:.1e} in plain JAX"


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 1152, 2048, 4096])
def test_kernels_of_the_rms_norm_are_as_good_as_plain_jax(width):
    assert api.fused_problem(4104, 1, width, "bfloat16") is None
    inputs = rms_inputs(4104, width)
    assert_as_good_as_plain(RMS, rms_norm, reference.rms_norm, defined_rms_norm, *inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 2048])
def test_kernels_add_the_gradients_of_what_skips_the_rms_norm(width):
    inputs, cotangents = rms_inputs(4104, width)
    cotangents = [*draw(1, (4104, width)), *cotangents]

    def plain(x, scale, *, eps):
        return x, reference.rms_norm(x, scale, eps=eps)

    def definition(x, scale):
        return x, defined_rms_norm(x, scale)

    assert_as_good_as_plain(["skip", *RMS], rms_norm_with_skip, plain, definition, inputs, cotangents)


@pytest.mark.gpu
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_kernels_of_the_gated_head_norm_are_as_good_as_plain_jax(width):
    assert api.fused_problem(4128, 3, width, "bfloat16") is None
    inputs = gated_inputs(4128, 3, width)
    assert_as_good_as_plain(GATED, gated_head_norm, reference.gated_head_norm, defined_gated_head_norm, *inputs)
