"""The mLSTM in kernels for Hopper GPUs: lowered and simulated everywhere, computed where there is one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.kernels.hopper import NEEDED_JAX, hopper_problem
from xlstm_jax.kernels.mlstm import MLSTMState, mlstm
from xlstm_jax.kernels.mlstm.api import choose_backend, resolve_backend
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.mlstm.mosaic.tiling import HEAD_DIMS, Tiling, choose_tiling, num_segments

needs_mosaic = pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
needs_hopper = pytest.mark.skipif(hopper_problem() is not None, reason="there is no Hopper GPU")
on_a_simulated_gpu = pytest.mark.skipif(hopper_problem() is None, reason="the kernels themselves are tested here")

OUTPUTS = ["hidden", "memory", "normalizer"]
INPUTS = ["q", "k", "v", "igate", "fgate", "state.memory", "state.normalizer"]
EASY, KEPT, STRONG, SMALL = (-3.0, 4.0), (-3.0, 8.0), (4.0, 8.0), (-10.0, 8.0)
"""Means of input and forget gates. At the first, little of a memory is left after a chunk."""


def drawn(spec, *, with_state=True, reset_rate=0.0):
    """Draw inputs in bfloat16, where documents begin, and gradients of the outputs and of the last state."""
    q, k, v, *gates = spec.arguments(jax.random.key(0))
    inputs = [x.astype(jnp.bfloat16) for x in (q, k, v)] + gates
    state = spec.state(jax.random.key(1)) if with_state else None
    shape = spec.batch_size, spec.length
    resets = jax.random.bernoulli(jax.random.key(2), reset_rate, shape) if reset_rate else None
    dhidden = jax.random.normal(jax.random.key(3), v.shape, jnp.bfloat16)
    dlast = jax.tree.map(lambda x: 0.01 * x, spec.state(jax.random.key(4)))
    return inputs, state, resets, dhidden, dlast._replace(stabilizer=jnp.zeros_like(dlast.stabilizer))


def everything(run, inputs, state, resets, dhidden, dlast):
    """Return outputs and last state, and the gradients of all inputs; forward and backward are programs of their own.

    In one program, XLA drops roundings to bfloat16 that a model has.
    """

    def forward(inputs, state):
        return jax.vjp(lambda inputs, state: run(*inputs, state, resets), inputs, state)

    (hidden, last), backward = jax.jit(forward)(inputs, state)
    cotangents = dhidden.astype(hidden.dtype), jax.tree.map(lambda c, x: c.astype(x.dtype), dlast, last)
    dinputs, dstate = jax.jit(lambda backward, cotangents: backward(cotangents))(backward, cotangents)
    names, gradients = (INPUTS, (*dinputs, *dstate[:2])) if state is not None else (INPUTS[:5], dinputs)
    return named([*OUTPUTS, *names], (hidden, *last[:2], *gradients))


def exact(spec, **options):
    """Compute the reference in float64."""
    inputs, state, resets, dhidden, dlast = drawn(spec, **options)
    with jax.enable_x64(True):
        inputs, state, dhidden, dlast = jax.tree.map(lambda x: x.astype("float64"), (inputs, state, dhidden, dlast))

        def run(q, k, v, igate, fgate, state, resets):
            return mlstm(q, k, v, igate, fgate, state=state, resets=resets, return_state=True, backend="parallel")

        return everything(run, inputs, state, resets, dhidden, dlast)


def computed(spec, backend, **options):
    """Compute all of it by a backend in bfloat16."""

    def run(q, k, v, igate, fgate, state, resets):
        gates = {"state": state, "resets": resets, "return_state": True, "chunk_size": 256}
        return mlstm(q, k, v, igate, fgate, backend=backend, **gates)

    return everything(run, *drawn(spec, **options))


def simulated(spec, tiling, **options):
    """Compute all of it by the kernels, on a simulated GPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from xlstm_jax.kernels.mlstm.mosaic.chunkwise import mlstm_mosaic

    def run(q, k, v, igate, fgate, state, resets):
        arguments = igate, jax.nn.log_sigmoid(fgate), state, resets, tiling, 1e-6, plgpu.InterpretGPUParams()
        return mlstm_mosaic(q, k, v, *arguments)

    return everything(run, *drawn(spec, **options))


def errors(actual, expected):
    """Return the error of each array and of its worst row, as shares of the norms of a sequence, for each sequence."""
    result = {}
    for name, e in expected.items():
        rows, difference = (_sequences(name, x) for x in (e, actual[name] - e))
        usual = np.sqrt(np.mean(np.sum(rows**2, axis=-1), axis=-1))
        assert not difference[usual == 0].any(), name
        sizes = np.sqrt(np.sum(difference**2, axis=-1))[usual > 0] / usual[usual > 0, None]
        result[name] = np.sqrt(np.mean(sizes**2, axis=-1)), sizes.max(axis=-1)
    return result


def rms(x):
    return np.sqrt(np.mean(x**2))


def _sequences(name, x):
    """Return the rows of each head of each sequence."""
    if name in ("hidden", *INPUTS[:5]):
        x = np.moveaxis(x, 2, 1)  # to batch, heads, positions
    width = 1 if name in ("igate", "fgate", "stabilizer") else x.shape[-1]
    return x.reshape(x.shape[0] * x.shape[1], -1, width)


def named(names, arrays):
    return {name: np.asarray(x, np.float64) for name, x in zip(names, arrays, strict=True)}


def assert_small(actual, expected, limit=1e-2):
    for name, (shares, _) in errors(actual, expected).items():
        assert rms(shares) < limit, f"{name}: {rms(shares):.4f}"


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
    from xlstm_jax.kernels.mlstm.mosaic.chunkwise import mlstm_mosaic

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
    for module in ("items", "tiling"):
        monkeypatch.setattr(f"xlstm_jax.kernels.mlstm.mosaic.{module}.NUM_SMS", num_sms)
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.mosaic.tiling.SEGMENT_CHUNKS", 1)
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
    for module in ("items", "tiling"):
        monkeypatch.setattr(f"xlstm_jax.kernels.mlstm.mosaic.{module}.NUM_SMS", 1)  # one block has all pieces of work
    for name, value in changes.items():
        monkeypatch.setattr(Tiling, name, value)
    assert_small(simulated(spec, Tiling(64, 128, chunk_size=256), **options), exact(spec, **options))


@needs_mosaic
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

    from xlstm_jax.kernels.mlstm.mosaic.chunkwise import mlstm_mosaic

    monkeypatch.setattr("xlstm_jax.kernels.mlstm.mosaic.items.NUM_SMS", 1)  # one block has all pieces of work
    for name, value in changes.items():
        monkeypatch.setattr(Tiling, name, value)
    spec = ArgSpec(1, length, 2, 64, 128, igate_mean=0.0, fgate_mean=8.0)
    (*qkv, igate, fgate), state, resets, weights, _ = drawn(spec, **options)
    interpret = None if hopper_problem() is None else plgpu.InterpretGPUParams()

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


def test_heads_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"heads of 64/64.*not 48/96"):
        choose_tiling(48, 96, 128)


@pytest.mark.skipif(hopper_problem() is None, reason="this is a Hopper GPU")
def test_kernels_that_cannot_run_say_why(key):
    inputs = [x.astype(jnp.bfloat16) for x in ArgSpec(1, 8, 1, 64, 64).arguments(key)]
    with pytest.raises(ValueError, match=r"'mosaic' cannot run here: this .* is no Hopper GPU"):
        mlstm(*inputs, backend="mosaic")
    assert choose_backend() == ("chunkwise", f"the chunkwise form in plain JAX, as {hopper_problem()}")


@pytest.mark.parametrize(
    ("arguments", "form"), [(["bfloat16"], "mosaic"), (["float32"], "chunkwise"), (["bfloat16", 96, 192], "chunkwise")]
)
def test_auto_takes_the_kernels_where_there_is_one(arguments, form, monkeypatch):
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_problem", lambda: None)
    assert choose_backend(*arguments)[0] == form


@pytest.mark.parametrize(
    ("shape", "options", "form"),
    [
        ((1, 128, 8), {"return_state": True}, "chunkwise"),
        ((1, 128, 8), {}, "mosaic"),
        ((1, 128, 8), {"return_state": True, "backend": "mosaic"}, "mosaic"),
        ((2, 256, 8), {"return_state": True}, "mosaic"),
        ((1, 512, 2), {"return_state": True}, "mosaic"),
    ],
)
def test_auto_takes_plain_jax_for_few_positions_and_a_state(shape, options, form, key, monkeypatch):
    class ChosenError(Exception):
        pass

    def implementation(form, chunk_size, *_):
        raise ChosenError(form, chunk_size)

    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api.hopper_problem", lambda: None)
    monkeypatch.setattr("xlstm_jax.kernels.mlstm.api._implementation", implementation)
    inputs = [x.astype(jnp.bfloat16) for x in ArgSpec(*shape, 64, 64).arguments(key)]
    with pytest.raises(ChosenError) as chosen:
        mlstm(*inputs, **options)
    assert chosen.value.args == (form, shape[1] if form == "chunkwise" else 64)


def test_kernels_compute_in_bfloat16_only():
    with pytest.raises(ValueError, match="compute in bfloat16, and this is float32"):
        resolve_backend("mosaic", jnp.float32)


CASES = [(dims, 1000, gates) for dims in HEAD_DIMS for gates in (KEPT, STRONG)]
CASES += [((256, 512), 2048, gates) for gates in (EASY, KEPT, STRONG, SMALL)] + [((128, 256), 77, KEPT)]


def typical(x):
    """Return the geometric mean."""
    return np.exp(np.mean(np.log(np.maximum(x, 1e-12))))


@needs_hopper
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dims", "length", "gates"), CASES)
def test_errors_are_those_of_plain_xla(dims, length, gates, documents, record_property):
    """Where a denominator is nearly zero, one position is most of a sequence's gradients, and its error is luck.

    Two chunk sizes of plain JAX differ by a factor of four in some sequences. Hence what is typical counts, and the
    worst only has a bound.
    """
    igate, fgate = gates
    spec = ArgSpec(4, length, 8, *dims, igate_mean=igate, fgate_mean=fgate)
    options = {"reset_rate": 0.003 * documents}
    expected = exact(spec, **options)
    ours, theirs = (errors(computed(spec, form, **options), expected) for form in ("mosaic", "chunkwise"))
    too_large = []
    for name, pair in ours.items():
        for what, a, b in zip(("norm", "worst row"), pair, theirs[name], strict=True):
            for of, limit in ((typical, 1.5), (rms, 2.0)):
                both = f"{name}, {what}, {of.__name__}: {of(a):.5f} beside {of(b):.5f}"
                record_property("errors", both)
                if of(a) > max(limit * of(b), 1e-3):  # Where plain JAX hardly rounds, both are exact.
                    too_large.append(both)
    assert not too_large, "; ".join(too_large)


@needs_hopper
@pytest.mark.parametrize(
    ("batch_size", "length", "num_heads", "dims"),
    [
        (8, 2048, 16, (128, 256)),
        (4, 2048, 32, (64, 128)),
        (8, 2048, 8, (256, 512)),
        (1, 8192, 8, (256, 512)),  # which is cut, as is the next
        (2, 8192, 3, (64, 128)),
    ],
)
def test_blocks_that_do_much_work_compute_what_plain_jax_does(batch_size, length, num_heads, dims):
    spec = ArgSpec(batch_size, length, num_heads, *dims, igate_mean=-3.0, fgate_mean=8.0)
    assert_small(computed(spec, "mosaic", with_state=False), computed(spec, "chunkwise", with_state=False))


@needs_hopper
@pytest.mark.parametrize("dims", HEAD_DIMS)
@pytest.mark.parametrize("length", [77, 256])
def test_a_chunk_without_memories_gives_the_bits_of_one_with_empty_memories(dims, length):
    spec = ArgSpec(40, length, 8, *dims, igate_mean=-3.0, fgate_mean=8.0)
    inputs, _, resets, dhidden, _ = drawn(spec, with_state=False, reset_rate=0.02)

    def results(return_state):
        def hidden(*inputs):
            result = mlstm(*inputs, resets=resets, backend="mosaic", return_state=return_state)
            return result[0] if return_state else result

        hidden, backward = jax.vjp(jax.jit(hidden), *inputs)
        return hidden, backward(dhidden)

    jax.tree.map(np.testing.assert_array_equal, results(True), results(False))


@needs_hopper
def test_two_runs_give_the_same_bits():
    spec = ArgSpec(2, 1024, 4, 256, 512, igate_mean=-3.0, fgate_mean=8.0)
    first, second = (computed(spec, "mosaic", reset_rate=0.003) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


@needs_hopper
@pytest.mark.parametrize("length", [1, 100, 300])
@pytest.mark.parametrize("input_gate", ["exp", "sigmoid"])
def test_any_length_and_input_gate(length, input_gate):
    spec = ArgSpec(2, length, 2, 64, 128, igate_mean=0.0, fgate_mean=6.0)
    inputs, state, *_ = drawn(spec)
    run = functools.partial(mlstm, *inputs, state=state, return_state=True, input_gate=input_gate)
    actual, expected = (jax.jit(functools.partial(run, backend=form))() for form in ("mosaic", "chunkwise"))
    names = [*OUTPUTS, "stabilizer"]
    assert_small(*(named(names, (hidden, *last)) for hidden, last in (actual, expected)))


@needs_hopper
@pytest.mark.parametrize("igate", [-50.0, 0.0, 50.0])
@pytest.mark.parametrize("fgate", [-50.0, 0.0, 50.0])
def test_extreme_gates_give_finite_results(igate, fgate):
    spec = ArgSpec(1, 300, 2, 64, 64, igate_mean=igate, fgate_mean=fgate)
    assert all(np.isfinite(x).all() for x in computed(spec, "mosaic").values())


@needs_hopper
def test_a_head_full_of_nan_stays_alone():
    inputs, *_ = drawn(ArgSpec(2, 300, 2, 64, 64, fgate_mean=6.0))
    clean = mlstm(*inputs, backend="mosaic")
    poisoned = mlstm(*(x.at[1, :, 1].set(jnp.nan) for x in inputs), backend="mosaic")
    assert np.isnan(poisoned[1, :, 1]).all()
    assert np.array_equal(poisoned[0], clean[0])
    assert np.array_equal(poisoned[1, :, 0], clean[1, :, 0])


@needs_hopper
def test_a_split_sequence_gives_the_result_of_a_whole_one():
    inputs, *_ = drawn(ArgSpec(2, 1000, 2, 128, 128, igate_mean=0.0, fgate_mean=8.0))
    run = jax.jit(functools.partial(mlstm, return_state=True, backend="mosaic"))
    whole, end = run(*inputs)
    first, middle = run(*(x[:, :444] for x in inputs))
    second, end_of_second = run(*(x[:, 444:] for x in inputs), state=middle)
    assert isinstance(end, MLSTMState)
    joined = np.concatenate([first, second], axis=1), end_of_second.memory
    assert_small(*(named(OUTPUTS[:2], results) for results in (joined, (whole, end.memory))))


def slices(arguments, borders):
    """Cut sequences at borders."""
    return [tuple(x[:, a:b] for x in arguments) for a, b in itertools.pairwise(borders)]


@needs_hopper
def test_gradients_flow_through_the_state_between_two_parts():
    inputs, *_, weights, _ = drawn(ArgSpec(2, 1000, 2, 128, 128, igate_mean=0.0, fgate_mean=8.0))
    run = functools.partial(mlstm, return_state=True, backend="mosaic")

    def loss(inputs, borders):
        state, parts = None, []
        for part in slices(inputs, (0, *borders, 1000)):
            hidden, state = run(*part, state=state)
            parts.append(hidden)
        return jnp.sum(jnp.concatenate(parts, axis=1).astype(jnp.float32) * weights)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    assert_small(*(named(INPUTS[:5], gradient(inputs, borders)) for borders in ((444,), ())))


@needs_hopper
def test_packed_documents_give_the_results_of_separate_ones():
    inputs, *_, weights, _ = drawn(ArgSpec(1, 1000, 2, 64, 128, igate_mean=0.0, fgate_mean=8.0))
    borders = (0, 100, 101, 600, 1000)
    resets = jnp.zeros((1, 1000), bool).at[0, jnp.array(borders[1:-1])].set(True)
    run = functools.partial(mlstm, backend="mosaic")

    def packed(inputs):
        hidden = run(*inputs, resets=resets)
        return jnp.sum(hidden.astype(jnp.float32) * weights), hidden

    def separate(inputs):
        hidden = jnp.concatenate([run(*part) for part in slices(inputs, borders)], axis=1)
        return jnp.sum(hidden.astype(jnp.float32) * weights), hidden

    results = (jax.jit(jax.grad(f, has_aux=True))(inputs) for f in (packed, separate))
    results = [named([*INPUTS[:5], "hidden"], (*gradients, hidden)) for gradients, hidden in results]
    assert_small(*results, limit=2e-2)  # as both are rounded


@needs_hopper
def test_a_document_that_begins_at_once_drops_the_initial_state():
    inputs, state, *_ = drawn(ArgSpec(2, 300, 2, 64, 64, igate_mean=0.0, fgate_mean=8.0))
    resets = jnp.zeros((2, 300), bool).at[:, 0].set(True)
    run = jax.jit(functools.partial(mlstm, backend="mosaic"))
    assert_small(*(named(["hidden"], [x]) for x in (run(*inputs, state=state, resets=resets), run(*inputs))))


@needs_hopper
def test_gates_that_jump_between_extremes_give_the_results_of_plain_jax():
    (q, k, v, igate, _), *_ = drawn(ArgSpec(1, 300, 2, 64, 64))
    signs = jax.random.rademacher(jax.random.key(5), (2, *igate.shape), igate.dtype)
    results = (mlstm(q, k, v, *(50.0 * signs), backend=form) for form in ("mosaic", "chunkwise"))
    assert_small(*(named(["hidden"], [x]) for x in results))


@needs_hopper
def test_no_output_depends_on_a_later_token():
    inputs, *_ = drawn(ArgSpec(1, 300, 2, 64, 64, igate_mean=0.0, fgate_mean=8.0))
    run = jax.jit(functools.partial(mlstm, backend="mosaic"))
    hidden, changed = (np.asarray(run(*x), np.float32) for x in (inputs, [x.at[:, 200:].add(1.0) for x in inputs]))
    assert np.array_equal(hidden[:, :200], changed[:, :200])
    assert np.abs(hidden - changed)[:, 200].max() > 0.1
