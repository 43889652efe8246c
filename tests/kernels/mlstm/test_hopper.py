"""The mLSTM in kernels for Hopper GPUs, where there is none: lowered, simulated, and chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.mlstm.comparisons import assert_small, computed, drawn, everything, exact

from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.mlstm.api import choose_backend, resolve_backend
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.mlstm.hopper.tiling import HEAD_DIMS, Tiling, choose_tiling, num_segments
from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX, hopper_unavailable_reason

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
on_a_simulated_gpu = pytest.mark.skipif(
    hopper_unavailable_reason() is None, reason="a Hopper GPU runs the kernels themselves"
)


def simulated(spec, tiling, **options):
    """Compute all of it by the kernels, on a simulated GPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.mlstm.hopper.chunkwise import mlstm_mosaic

    def run(q, k, v, igate, fgate, state, resets):
        arguments = igate, jax.nn.log_sigmoid(fgate), state, resets, tiling, 1e-6, plgpu.InterpretGPUParams()
        return mlstm_mosaic(q, k, v, *arguments)

    return everything(run, *drawn(spec, **options))


@needs_mosaic
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize(
    ("shape", "options", "return_state", "num_kernels"),
    [
        ((2, 1024, 40), {"reset_rate": 0.1}, True, 5),
        ((1, 8192, 2), {"with_state": False}, True, 7),  # sequences are cut, and walked over twice, there and back
        ((2, 256, 40), {"with_state": False}, False, 3),  # a chunk that is alone needs no walk
    ],
)
def test_every_tiling_lowers_for_a_gpu(dims, shape, options, return_state, num_kernels):
    from xlstm_jax.kernels.mlstm.hopper.chunkwise import mlstm_mosaic

    spec = ArgSpec(*shape, *dims)
    tiling = choose_tiling(*dims, spec.length)
    inputs, state, resets, dhidden, dlast = jax.eval_shape(functools.partial(drawn, spec, **options))

    def run(q, k, v, igate, fgate, state, resets, dhidden, dlast):
        def forward(q, k, v, igate, fgate, state):
            log_forget = jax.nn.log_sigmoid(fgate)
            return mlstm_mosaic(q, k, v, igate, log_forget, state, resets, tiling, 1e-6, None, return_state)

        result, backward = jax.vjp(forward, q, k, v, igate, fgate, state)
        return result, backward((dhidden, dlast if return_state else None))

    lowered = jax.jit(run).trace(*inputs, state, resets, dhidden, dlast).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == num_kernels


@needs_mosaic
@on_a_simulated_gpu
@pytest.mark.parametrize(
    ("dims", "num_heads", "num_sms", "segments", "options"),
    [
        ((64, 64), 1, 4, 4, {"reset_rate": 0.002}),  # the sequence is cut
        ((64, 64), 1, 1, 1, {"with_state": False}),  # one block does all of its work
        ((64, 128), 2, 3, 1, {"reset_rate": 0.01}),  # there is less work in the last turn
    ],
)
def test_simulated_kernels_compute_the_reference_and_all_its_gradients(
    dims, num_heads, num_sms, segments, options, monkeypatch
):
    spec = ArgSpec(1, 512, num_heads, *dims, igate_mean=4.0, fgate_mean=5.0)
    for module in ("mosaic_gpu.schedule", "mlstm.hopper.tiling"):
        monkeypatch.setattr(f"xlstm_jax.kernels.{module}.NUM_SMS", num_sms)
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.hopper.tiling.SEGMENT_CHUNKS", 1)
    tiling = Tiling(*dims, chunk_size=128)
    assert num_segments(num_heads, tiling, spec.length // tiling.chunk_size) == segments
    actual = simulated(spec, tiling, **options)
    assert_small(actual, exact(spec, **options))


WIDE = {"output_stages": 1, "output_slots": 5, "pair_stages": 1, "pair_slots": 3, "pair_vectors_fit": False}
"""What is different in tilings of wide heads."""


@needs_mosaic
@on_a_simulated_gpu
@pytest.mark.parametrize(
    ("changes", "options"),
    [({}, {"with_state": False}), (WIDE, {"reset_rate": 0.01})],
)
def test_long_chunks_are_right_where_shared_memory_is_plenty_and_where_it_is_short(changes, options, monkeypatch):
    spec = ArgSpec(1, 512, 1, 64, 128, igate_mean=4.0, fgate_mean=5.0)
    for module in ("mosaic_gpu.schedule", "mlstm.hopper.tiling"):
        monkeypatch.setattr(f"xlstm_jax.kernels.{module}.NUM_SMS", 1)  # one block has all work items
    for name, value in changes.items():
        monkeypatch.setattr(Tiling, name, value)
    assert_small(simulated(spec, Tiling(64, 128, chunk_size=256), **options), exact(spec, **options))


@needs_mosaic
@on_a_simulated_gpu
@pytest.mark.parametrize(
    ("length", "options", "changes"),
    [
        (256, {"with_state": False}, {}),
        (256, {"with_state": True}, {}),
        (128, {"with_state": False}, {}),  # a chunk that is alone has no memories if none are asked for
        (128, {"with_state": False, "reset_rate": 0.02}, WIDE),
    ],
)
def test_results_do_not_depend_on_whether_the_last_state_is_returned(length, options, changes, monkeypatch):
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.mlstm.hopper.chunkwise import mlstm_mosaic

    monkeypatch.setattr("xlstm_jax.kernels.mosaic_gpu.schedule.NUM_SMS", 1)  # one block has all work items
    for name, value in changes.items():
        monkeypatch.setattr(Tiling, name, value)
    spec = ArgSpec(1, length, 2, 64, 128, igate_mean=0.0, fgate_mean=8.0)
    (*qkv, igate, fgate), state, resets, weights, _ = drawn(spec, **options)
    interpret = plgpu.InterpretGPUParams()

    def results(return_state):
        def total(qkv, gates, state):
            options = state, resets, Tiling(64, 128, 128), 1e-6, interpret, return_state
            hidden, _ = mlstm_mosaic(*qkv, *gates, *options)
            return jnp.sum(hidden * weights), hidden

        run = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))
        return run(qkv, (igate, jax.nn.log_sigmoid(fgate)), state)

    jax.tree.map(np.testing.assert_array_equal, results(True), results(False))


def test_few_heads_cut_their_sequences_until_a_gpu_is_full():
    tiling = choose_tiling(256, 512, 65536)
    assert num_segments(64, tiling, 256) == 1
    assert num_segments(8, tiling, 256) == 4
    assert num_segments(1, tiling, 256) == 32
    assert num_segments(8, tiling, 36) == 4  # of nine chunks each


@pytest.mark.parametrize(
    ("num_heads", "dims", "num_chunks"),
    [
        (16, (256, 512), 256),  # there would be two
        (32, (128, 256), 32),  # much is read
        (8, (256, 512), 16),  # they would be short
        (8, (256, 512), 33),  # they would not be made of whole chunks
    ],
)
def test_sequences_stay_whole_where_parts_would_not_be_faster(num_heads, dims, num_chunks):
    assert num_segments(num_heads, choose_tiling(*dims, 8192), num_chunks) == 1


def test_short_sequences_have_short_chunks():
    assert [choose_tiling(64, 64, length).chunk_size for length in (1, 128, 129, 8192)] == [128, 128, 256, 256]


@pytest.mark.parametrize(
    ("dims", "widened"),
    [
        ((48, 96), (64, 128)),
        ((96, 192), (128, 256)),
        ((192, 384), (256, 512)),
        ((64, 256), (128, 256)),
        ((8, 56), (64, 64)),
    ],
)
def test_heads_of_other_sizes_have_the_tiles_of_the_next_larger_ones(dims, widened):
    assert choose_tiling(*dims, 128) == choose_tiling(*widened, 128)


@pytest.mark.parametrize(
    ("dims", "misfit"), [((8, 48), "is less than half of 64/64"), ((384, 384), "is larger"), ((64, 513), "is larger")]
)
def test_heads_that_fit_no_kernel_are_refused(dims, misfit):
    with pytest.raises(ValueError, match=rf"heads of 64/64.*and {dims[0]}/{dims[1]} {misfit}"):
        choose_tiling(*dims, 128)


@pytest.fixture
def simulated_gpu(monkeypatch):
    """Let the backend `mosaic` run, on a simulated GPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.mlstm.hopper.chunkwise import mlstm_mosaic

    def run(*arguments):
        *before, _, return_state, scale = arguments
        return mlstm_mosaic(*before, plgpu.InterpretGPUParams(), return_state, scale)

    monkeypatch.setattr("xlstm_jax.kernels.mlstm.hopper.chunkwise.mlstm_mosaic", run)
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr("xlstm_jax.kernels.mosaic_gpu.schedule.NUM_SMS", 1)


@needs_mosaic
@on_a_simulated_gpu
@pytest.mark.parametrize(
    ("dims", "igate", "options"),
    [
        ((40, 48), 4.0, {"reset_rate": 0.01}),
        ((33, 100), -3.0, {"with_state": False}),  # outputs depend on the scale of queries
    ],
)
def test_heads_that_are_filled_up_compute_the_reference_and_all_its_gradients(dims, igate, options, simulated_gpu):
    spec = ArgSpec(1, 200, 1, *dims, igate_mean=igate, fgate_mean=5.0)
    assert_small(computed(spec, "mosaic", **options), exact(spec, **options))


@pytest.mark.skipif(hopper_unavailable_reason() is None, reason="this is a Hopper GPU")
def test_kernels_that_cannot_run_say_why(key):
    inputs = [x.astype(jnp.bfloat16) for x in ArgSpec(1, 8, 1, 64, 64).arguments(key)]
    with pytest.raises(ValueError, match=r"'mosaic' cannot run here: this .* is not a Hopper GPU"):
        mlstm(*inputs, backend="mosaic")
    assert choose_backend() == ("chunkwise", f"the chunkwise form in plain JAX, as {hopper_unavailable_reason()}")


@pytest.mark.parametrize(
    ("arguments", "form"), [(["bfloat16"], "mosaic"), (["float32"], "chunkwise"), (["bfloat16", 512, 512], "chunkwise")]
)
def test_auto_takes_the_kernels_where_there_is_one(arguments, form, monkeypatch):
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_unavailable_reason", lambda: None)
    assert choose_backend(*arguments)[0] == form


def test_auto_says_that_heads_are_filled_up(monkeypatch):
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_unavailable_reason", lambda: None)
    form, reason = choose_backend(jnp.bfloat16, 96, 192)
    assert (form, reason.split(", ")[1]) == ("mosaic", "with heads of 96/192 filled up to 128/256")


@pytest.mark.parametrize(
    ("shape", "options", "form"),
    [
        ((1, 128, 8, 64, 64), {"return_state": True}, "chunkwise"),
        ((1, 128, 8, 64, 64), {}, "mosaic"),
        ((1, 128, 8, 64, 64), {"return_state": True, "backend": "mosaic"}, "mosaic"),
        ((2, 256, 8, 64, 64), {"return_state": True}, "mosaic"),
        ((1, 512, 2, 64, 64), {"return_state": True}, "mosaic"),
        ((1, 128, 8, 48, 96), {}, "chunkwise"),
        ((2, 256, 8, 48, 96), {}, "mosaic"),
    ],
)
def test_auto_takes_plain_jax_for_few_positions_that_take_more_than_the_kernels(shape, options, form, key, monkeypatch):
    class ChosenError(Exception):
        pass

    def implementation(form, chunk_size, *_):
        raise ChosenError(form, chunk_size)

    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_unavailable_reason", lambda: None)
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api._implementation", implementation)
    inputs = [x.astype(jnp.bfloat16) for x in ArgSpec(*shape).arguments(key)]
    with pytest.raises(ChosenError) as chosen:
        mlstm(*inputs, **options)
    assert chosen.value.args == (form, shape[1] if form == "chunkwise" else 64)


def test_kernels_compute_in_bfloat16_only(monkeypatch):
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_unavailable_reason", lambda: None)
    with pytest.raises(ValueError, match="compute in bfloat16, and this is float32"):
        resolve_backend("mosaic", jnp.float32)


def test_kernels_are_refused_for_an_eps_whose_gradient_they_leave_out(monkeypatch):
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_unavailable_reason", lambda: None)
    assert choose_backend(eps=1e-4)[0] == "mosaic"
    assert choose_backend(eps=1e-2)[0] == "chunkwise"
    with pytest.raises(ValueError, match=r"exact gradients up to an eps of 0.0001, and this is 0.01"):
        resolve_backend("mosaic", eps=1e-2)
