"""The sLSTM kernel for Hopper GPUs: lowered for them on any machine, interpreted on a CPU, run where there is one."""

import functools
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX, hopper_unavailable_reason
from xlstm_jax.kernels.shared.log_once import log_once
from xlstm_jax.kernels.slstm import SLSTMState, api, slstm
from xlstm_jax.kernels.slstm.arg_specs import ArgSpec
from xlstm_jax.kernels.slstm.hopper import limits

needs_pallas = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Pallas for Hopper GPUs needs jax 0.11")
is_hopper = hopper_unavailable_reason() is None
needs_interpreter = pytest.mark.skipif(is_hopper, reason="the kernel itself is tested here")

VARIANTS = {
    "plain": {},
    "documents": {"reset_rate": 0.2},
    "masked": {"mask_rate": 0.3},
    "masked documents": {"reset_rate": 0.2, "mask_rate": 0.3},
}


@pytest.fixture
def hopper(monkeypatch):
    """Let the kernel be chosen, whatever the device."""
    monkeypatch.setattr(limits, "hopper_unavailable_reason", lambda: None)


@pytest.fixture
def interpreted(hopper, monkeypatch):
    """Let the kernel be computed by Pallas's interpreter."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.slstm.hopper import sequence

    real, params = sequence.slstm_mosaic, plgpu.InterpretGPUParams()
    monkeypatch.setattr(sequence, "slstm_mosaic", lambda *arguments: real(*arguments, params))


def drawn_flags(spec, reset_rate=0.0, mask_rate=0.0):
    draw, rows = np.random.default_rng(0), (spec.batch_size, spec.length)
    resets = jnp.asarray(draw.random(rows) < reset_rate) if reset_rate else None
    mask = jnp.asarray(draw.random(rows) > mask_rate) if mask_rate else None
    return resets, mask


def gradients_and_results(backend, dtype, flags, projections):
    """Return a function of gates, recurrent kernel and state, for a loss on all results."""
    resets, mask = flags

    def loss(gates, recurrent, state):
        hidden, last = slstm(
            gates, recurrent, state=state, resets=resets, mask=mask, return_state=True, backend=backend
        )
        results = (hidden, *last)
        return sum(jnp.sum(x.astype(dtype) * p) for x, p in zip(results, projections, strict=True)), results

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)


@functools.cache
def drawn(spec):
    """Return gates and recurrent kernel, both numbers of bfloat16, a state, and what all results are projected on."""

    @jax.jit
    def draw():
        arguments = [x.astype(jnp.bfloat16) for x in spec.arguments(jax.random.key(0), jnp.float32)]
        return arguments, spec.state(jax.random.key(1), jnp.float32)

    generator, of_state = np.random.default_rng(1), (spec.batch_size, spec.num_heads, spec.head_dim)
    shapes = [(spec.batch_size, spec.length, *of_state[1:])] + [of_state] * 4
    return *jax.device_get(draw()), [generator.standard_normal(shape, "float32") for shape in shapes]


@functools.cache
def everything(spec, backend, *, is_exact=False, gate_dtype="float32", variant="plain"):
    """Return results and all gradients, from one set of numbers, whatever the precision."""
    (gates, recurrent), state, projections = drawn(spec)
    with jax.enable_x64(is_exact):
        precision = "float64" if is_exact else "float32"
        gates = jnp.asarray(gates, precision if is_exact else gate_dtype)
        recurrent = jnp.asarray(recurrent, precision if is_exact else jnp.bfloat16)
        state, projections = jax.tree.map(lambda x: jnp.asarray(x, precision), (state, projections))
        run = jax.jit(gradients_and_results(backend, precision, drawn_flags(spec, **VARIANTS[variant]), projections))
        (dgates, drecurrent, dstate), (hidden, *last) = run(gates, recurrent, state)
        named = {"outputs": hidden, "dgates": dgates, "drecurrent": drecurrent}
        named |= dict(zip(SLSTMState._fields, last, strict=True))
        named |= {f"dstate.{name}": x for name, x in dstate._asdict().items()}
        return {name: np.asarray(x, np.float64) for name, x in named.items()}


def root_mean_square(x):
    return np.sqrt(np.mean(np.square(x)))


def assert_as_exact_as_the_scan(spec, **options):
    """Compare errors beside float64: the kernel rounds where the scan in bfloat16 rounds, and nowhere else.

    Return what the kernel and the scan give.
    """
    exact = everything(spec, "reference", is_exact=True, variant=options.get("variant", "plain"))
    scan, kernel = everything(spec, "recompute", **options), everything(spec, "mosaic", **options)
    for name, expected in exact.items():
        allowed = 1.5 * root_mean_square(scan[name] - expected) + 3e-6 * root_mean_square(expected)
        error = root_mean_square(kernel[name] - expected)
        assert error <= allowed, f"{name}: {error:.2e}, where {allowed:.2e} is allowed"
    return kernel, scan


def launches(run, *shapes):
    """Lower a function for GPUs, which any machine can, and return its launches of kernels."""
    lowered = run.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in lowered.splitlines() if "custom_call @mosaic_gpu" in line]


@needs_pallas
@pytest.mark.parametrize(
    ("variant", "gate_dtype"),
    [("plain", "float32"), ("documents", "bfloat16"), ("masked", "float32"), ("masked documents", "bfloat16")],
)
@pytest.mark.parametrize("head_dim", limits.HEAD_DIMS)
@pytest.mark.usefixtures("hopper")
def test_every_layout_and_option_compiles_for_a_hopper_gpu(head_dim, variant, gate_dtype):
    spec = ArgSpec(9, 5, 2, head_dim)
    state = jax.eval_shape(spec.state, jax.random.key(0))
    gates, recurrent = jax.eval_shape(spec.arguments, jax.random.key(0))
    projections = [jnp.float32(1)] * 5
    run = gradients_and_results("mosaic", jnp.float32, drawn_flags(spec, **VARIANTS[variant]), projections)
    inputs = gates.update(dtype=gate_dtype), recurrent.update(dtype=jnp.bfloat16), state
    assert len(launches(jax.jit(run), *inputs)) == 2


@needs_pallas
@pytest.mark.usefixtures("hopper")
def test_a_forward_pass_alone_is_one_launch_that_keeps_nothing():
    spec = ArgSpec(8, 5, 2, 64)
    gates, recurrent = jax.eval_shape(spec.arguments, jax.random.key(0))
    recurrent = recurrent.update(dtype=jnp.bfloat16)
    run = jax.jit(lambda *inputs: slstm(*inputs, backend="mosaic"))
    (launch,) = launches(run, gates, recurrent)
    assert launch.endswith("-> (tensor<8x5x2x64xf32>, tensor<8x4x2x64xf32>)")


@needs_pallas
@needs_interpreter
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (ArgSpec(2, 7, 2, 64), {"variant": "masked documents"}),
        (ArgSpec(1, 1, 1, 128), {"gate_dtype": "bfloat16"}),
        (ArgSpec(9, 3, 1, 192), {}),
        (ArgSpec(2, 5, 2, 40), {"variant": "masked documents"}),  # which is filled up
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_the_interpreted_kernel_gives_the_scan_and_is_as_exact(spec, options):
    kernel, scan = assert_as_exact_as_the_scan(spec, **options)
    rounding = 1e-3 if options.get("gate_dtype") is None else 1e-2
    assert_close_by_norm(kernel, scan, relative=rounding)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        (ArgSpec(16, 512, 4, 192), {}),
        (ArgSpec(11, 131, 3, 192), {"variant": "documents", "gate_dtype": "bfloat16"}),
        (ArgSpec(11, 131, 3, 192), {"variant": "masked"}),
        (ArgSpec(11, 131, 3, 192), {"variant": "masked documents", "gate_dtype": "bfloat16"}),
        (ArgSpec(11, 131, 3, 128), {"variant": "masked documents"}),
        (ArgSpec(11, 131, 3, 64), {"variant": "masked documents"}),
        (ArgSpec(300, 40, 4, 128), {"gate_dtype": "bfloat16"}),
        (ArgSpec(300, 40, 4, 64), {}),
        (ArgSpec(1, 1, 2, 192), {}),
        (ArgSpec(11, 131, 3, 96), {"variant": "masked documents", "gate_dtype": "bfloat16"}),
        (ArgSpec(8, 300, 2, 128, igate_mean=4.0, fgate_mean=-2.0), {}),
        (ArgSpec(8, 300, 2, 192, igate_mean=-4.0, fgate_mean=8.0), {}),
    ],
    ids=str,
)
def test_the_kernel_is_as_exact_as_the_scan(spec, options):
    assert_as_exact_as_the_scan(spec, **options)


@pytest.mark.gpu
def test_two_runs_of_the_kernel_give_the_same_bits():
    first, second = (everything.__wrapped__(ArgSpec(16, 700, 4, 192), "mosaic") for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@needs_pallas
@pytest.mark.parametrize("gate", [-1e4, -100.0, 100.0, 1e4])
def test_a_first_token_beyond_the_range_of_the_exponential_has_finite_gradients(gate, request):
    request.getfixturevalue("hopper" if is_hopper else "interpreted")
    gates, recurrent = ArgSpec(2, 2, 1, 64).arguments(jax.random.key(0))
    gates = gates.at[:, 0, 0].add(gate).at[:, 1, 1:].add(gate)

    def loss(gates, recurrent, backend):
        return jnp.sum(jnp.sin(slstm(gates, recurrent, backend=backend)))

    inputs = gates, recurrent.astype(jnp.bfloat16)
    actual, expected = (
        jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(*inputs, backend)
        for backend in ("mosaic", "recompute")
    )
    assert_close(actual[0], expected[0], dtype=jnp.float16)
    assert_close(actual[1], expected[1], dtype=jnp.bfloat16)


@needs_pallas
def test_a_row_full_of_nan_stays_alone(request):
    request.getfixturevalue("hopper" if is_hopper else "interpreted")
    gates, recurrent = ArgSpec(3, 3, 1, 64).arguments(jax.random.key(0))
    recurrent = recurrent.astype(jnp.bfloat16)

    @jax.jit
    def outputs_and_gradient(gates):
        def loss(gates):
            hidden = slstm(gates, recurrent, backend="mosaic")
            return jnp.sum(jnp.sin(hidden)), hidden

        return jax.grad(loss, has_aux=True)(gates)

    clean, poisoned = outputs_and_gradient(gates), outputs_and_gradient(gates.at[1].set(jnp.nan))
    assert np.isnan(poisoned[1][1]).all()
    others = np.array([0, 2])
    assert_close([x[others] for x in poisoned], [x[others] for x in clean])


@pytest.mark.usefixtures("hopper")
def test_auto_picks_the_kernel_where_it_can_run():
    assert api.choose_backend(192, jnp.bfloat16)[0] == "mosaic"
    assert api.resolve_backend("auto", 64, jnp.bfloat16) == "mosaic"
    form, reason = api.choose_backend(100)
    assert (form, reason.split("; ")[1]) == ("mosaic", "heads of 100 units are filled up to 128")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((256, jnp.bfloat16), "heads of 32 to 192 units, and these have 256"),
        ((24, jnp.bfloat16), "heads of 32 to 192 units, and these have 24"),
        ((64, jnp.float32), "in bfloat16, and the recurrent kernel is in float32"),
        ((64, jnp.bfloat16, jnp.float64), "in float32, and these gates need float64"),
        ((64, jnp.bfloat16, jnp.float32, 2**30), "at most 357,913,941 cells, and these are 1,073,741,824"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_cannot_compute_is_left_to_the_scan_and_refused_if_asked_for(arguments, problem):
    form, reason = api.choose_backend(*arguments)
    assert form == "recompute"
    assert problem in reason
    with pytest.raises(ValueError, match=f"'mosaic' cannot compute this: .*{problem}. Use 'auto' or 'recompute'"):
        api.resolve_backend("mosaic", *arguments)


@pytest.mark.skipif(is_hopper, reason="the kernel runs here")
def test_the_kernel_is_refused_where_there_is_no_hopper_gpu(key):
    gates, recurrent = ArgSpec(1, 2, 1, 64).arguments(key)
    with pytest.raises(ValueError, match=r"'mosaic' cannot compute this: this .* is not a Hopper GPU"):
        slstm(gates, recurrent.astype(jnp.bfloat16), backend="mosaic")


def test_auto_says_why_it_does_not_pick_the_kernel(caplog, monkeypatch):
    monkeypatch.setattr(limits, "hopper_unavailable_reason", lambda: "this GPU is older")
    log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="xlstm_jax.kernels.slstm.api"):
        assert api.resolve_backend("auto") == "recompute"
    (record,) = caplog.records
    assert record.message.endswith("that keeps only hidden states, as this GPU is older.")


def test_the_kernel_is_not_imported_before_it_is_chosen():
    code = "import sys, xlstm_jax.kernels.slstm; sys.exit('jax.experimental.pallas' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
