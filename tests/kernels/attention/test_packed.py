"""Attention within documents: cuDNN's packed layout, with its calls emulated, and the choice between forms."""

import logging
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from kernels.attention import emulation
from tolerances import assert_close

from xlstm_jax.kernels.attention import api, packed
from xlstm_jax.kernels.attention.documents import number_documents
from xlstm_jax.kernels.attention.packed import packed_attention
from xlstm_jax.kernels.mosaic_gpu.availability import NEEDED_JAX
from xlstm_jax.kernels.shared.log_once import log_once
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.llama import attention as llama_attention

pytestmark = pytest.mark.slow

LENGTH = 13
LAYOUTS = {
    "one document a row": [[LENGTH]] * 3,
    "several documents": [[5, 1, 7], [13], [2, 3, 4, 4]],
    "as many documents as slots": [[4, 9], [6, 7], [1, 12]],
    "all documents in one row": [[1] * LENGTH, [LENGTH], [LENGTH]],
    "every position is a document": [[1] * LENGTH] * 3,
}
HOPPER = types.SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")


def ids_of(layout, different=3):
    """Give neighbouring documents different ids; there are only a few ids, unless more are asked for."""
    return np.array([np.repeat(np.arange(len(lengths)) % different, lengths) for lengths in layout], np.int32)


def draw(b=3, s=LENGTH, heads=4, kv_heads=2, d=8, dtype=jnp.bfloat16):
    """Draw queries, keys, values and a gradient of the outputs."""
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.normal(size=(b, s, h, d)), dtype) for h in (heads, kv_heads, kv_heads, heads)]


def run(attend, q, k, v, dout):
    """Return the outputs of attention and the gradients of its inputs."""

    @jax.jit
    def both(q, k, v, dout):
        out, backward = jax.vjp(attend, q, k, v)
        return out, *backward(dout)

    return both(q, k, v, dout)


def packed_on(ids, causal=True, slots_per_row=2):
    """Return packed attention within documents."""

    def attend(q, k, v):
        return packed_attention(q, k, v, number_documents(jnp.asarray(ids)), causal, 0.3, slots_per_row)

    return attend


@pytest.fixture
def cudnn(monkeypatch):
    """Emulate the calls of cuDNN on the host."""
    monkeypatch.setattr(jax.ffi, "ffi_call", emulation.emulate_call)


@pytest.fixture
def hopper(monkeypatch):
    """Pretend that there is a Hopper GPU, and that `auto` takes cuDNN."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [HOPPER])
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: "it is not asked for")
    log_once.cache_clear()


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_attention_is_attention_within_documents(layout, kv_heads, causal):
    inputs, lengths = draw(kv_heads=kv_heads), LAYOUTS[layout]
    expected = emulation.reference(*inputs, ids_of(lengths, LENGTH), 0.3, causal=causal)
    assert_close(run(packed_on(ids_of(lengths), causal), *inputs), tuple(expected), dtype=jnp.bfloat16)


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize(("slots_per_row", "passes"), [(2, 3), (4, 2), (7, 1), (100, 1)])
def test_documents_take_as_many_passes_as_they_need(monkeypatch, slots_per_row, passes):
    calls, emulate = [], emulation.emulate_call

    def count(target, results, **options):
        call = emulate(target, results, **options)

        def counted(*operands):
            jax.debug.callback(lambda: calls.append(target))
            return call(*operands)

        return counted

    monkeypatch.setattr(jax.ffi, "ffi_call", count)
    ids = ids_of([[1] * LENGTH, [5, 1, 7], [LENGTH]])
    jax.block_until_ready(jax.jit(packed_on(ids, slots_per_row=slots_per_row))(*draw()[:3]))
    jax.effects_barrier()
    assert calls == [packed.FORWARD] * passes


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.nothing_saveable])
def test_packed_attention_is_the_same_in_a_sharded_rematerialised_scan(policy):
    inputs, ids = draw(b=4), ids_of([[5, 8], [13], [1] * LENGTH, [2, 3, 4, 4]], LENGTH)
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("dp",)), PartitionSpec("dp")

    def attend(q, k, v, ids):
        def body(carry, _):
            return carry, packed_attention(q, k, v, number_documents(ids), True, 0.3, 2)

        return jax.lax.scan(jax.checkpoint(body, policy=policy), 0, length=1)[1][0]

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec, check_vma=False)
    expected = emulation.reference(*inputs, ids, 0.3)
    actual = run(lambda q, k, v: sharded(q, k, v, jnp.asarray(ids)), *inputs)
    assert_close(actual, tuple(expected), dtype=jnp.bfloat16)


def test_documents_are_runs_of_equal_ids_and_end_with_their_row():
    documents = number_documents(jnp.array([[7, 7, 2, 7], [7, 0, 0, 0]]))
    np.testing.assert_array_equal(documents, [[0, 0, 1, 2], [3, 4, 4, 4]])


@pytest.mark.parametrize(
    ("changes", "shape", "problem"),
    [
        ({}, (2, 6, 4, 64), None),
        ({"compute_capability": "10.0"}, (2, 6, 4, 64), None),
        ({"compute_capability": "8.0", "device_kind": "A100"}, (2, 6, 4, 64), "not A100"),
        ({}, (2, 6, 4, 256), "not 256"),
        ({}, (2, 6, 4, 12), "not 12"),
        ({}, (2, 1, 4, 64), "2 rows of 1 positions"),
        ({}, (1, 2**17, 32, 128), "1 rows of 131072 positions"),
        ({}, (16, 32768, 32, 128), "2147483648 numbers"),
        ({}, (64, 8192, 32, 128), "2147483648 numbers"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_the_packed_layout_needs_a_gpu_and_shapes_that_fit(monkeypatch, changes, shape, problem):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(**(vars(HOPPER) | changes))])
    messages = []
    jax.eval_shape(lambda q: messages.append(api.packed_problem(q, q)), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert messages == [None] if problem is None else problem in messages[0]


@pytest.mark.parametrize(
    ("shape", "slots"),
    [((16, 8192, 12, 64), 16), ((8, 8192, 16, 128), 16), ((4, 8192, 32, 128), 16), ((2, 32768, 32, 128), 4)],
)
def test_the_longer_rows_are_the_fewer_slots_they_have(shape, slots):
    assert packed.choose_slots(*shape) == slots
    of_row = slots * math.prod(shape[1:])
    assert of_row <= 2**29
    assert of_row * shape[0] <= 2**31


def gradient_text(remat="none", length=256, head_dim=16):
    """Lower a gradient of a Llama of two blocks for GPUs."""
    config = LlamaConfig(
        vocab_size=32,
        embedding_dim=2 * head_dim,
        num_blocks=2,
        head_dim=head_dim,
        dtype="bfloat16",
        mask_across_document_boundaries=True,
        remat=remat,
        max_state_length=length,
    )
    model, tokens = LlamaTransformer(config), jnp.zeros((2, length), jnp.int32)
    borders = tokens.astype(bool)
    params = jax.eval_shape(lambda key: model.init(key, tokens, document_borders=borders), jax.random.key(0))

    def loss(params, tokens, borders):
        return jnp.mean(model.apply(params, tokens, document_borders=borders).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss)).trace(params, tokens, borders)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.usefixtures("hopper")
def test_no_array_of_a_step_on_a_hopper_gpu_has_two_axes_of_the_sequence():
    text = gradient_text(length=250)
    assert packed.FORWARD in text
    assert packed.BACKWARD in text
    shapes = [shape.split("x") for shape in re.findall(r"tensor<([0-9x]+)x[a-z]", text)]
    assert not [shape for shape in shapes if shape.count("250") > 1]


@pytest.mark.skipif(jax.__version_info__ < NEEDED_JAX, reason="Mosaic GPU kernels need jax 0.11")
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("remat", "kernels"), [("none", 3), ("norms", 3), ("dots", 3), ("full", 4)])
def test_auto_takes_the_kernels_and_only_full_rematerialisation_runs_them_again(monkeypatch, remat, kernels):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    text = gradient_text(remat, length=250, head_dim=64)
    assert text.count("mosaic_gpu_v2") == kernels
    shapes = [shape.split("x") for shape in re.findall(r"tensor<([0-9x]+)x[a-z]", text)]
    assert not [shape for shape in shapes if shape.count("250") > 1 or shape.count("256") > 1]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("remat", "times"), [("none", 1), ("norms", 1), ("dots", 1), ("full", 2)])
def test_only_full_rematerialisation_runs_attention_again(remat, times):
    text = gradient_text(remat)
    assert text.count(f"@{packed.BACKWARD}(") == 2  # the first pass, and the loop over others
    assert text.count(f"@{packed.FORWARD}(") == 2 * times


def test_calls_are_those_of_the_binding_of_jax(monkeypatch):
    binding = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(binding, "check_cudnn_version", lambda: 91700)
    monkeypatch.setattr(binding, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(binding, "check_is_flash_attention", lambda *_, **__: None)
    inputs, lengths = draw(), jnp.zeros((3, 5), jnp.int32)
    offsets = jnp.zeros((3, 6), jnp.int32)

    def theirs(q, k, v):
        seqlen, of = {"q_seqlen": lengths, "kv_seqlen": lengths}, {"q_offsets": offsets, "kv_offsets": offsets}
        mask_type = binding.MaskType.PADDING_CAUSAL
        return binding.dot_product_attention(q, k, v, **seqlen, **of, scale=0.3, mask_type=mask_type)

    def calls(attend):
        def both(q, k, v, dout):
            out, backward = jax.vjp(attend, q, k, v)
            return out, *backward(dout)

        text = jax.jit(both).trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
        lines = [line.split("custom_call ")[1] for line in text.splitlines() if "@__cudnn" in line]
        return {re.sub(r"%\w+(#\d+)?", "", line).replace(" ", "") for line in lines}

    ours = calls(packed_on(np.zeros((3, LENGTH), np.int32), slots_per_row=5))
    assert {describe(line) for line in ours} == {describe(line) for line in calls(theirs)}


def describe(line):
    """Return what XLA is told about a call, less the layout of scores, whose fields have default values."""
    config = re.search(r'backend_config="(.*?)"[,}]', line)
    settings = re.sub(r'"layout":\{.*?\},?', "", config[1].replace("\\22", '"'))
    settings = sorted(re.sub(r'"tuple_shapes":\[\],?', "", settings).replace("{", ",").replace("}", ",").split(","))
    return line.replace(config[0], ""), tuple(x for x in settings if x)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("backend", "not_mosaic", "not_packed", "form", "description"),
    [
        ("auto", None, None, "mosaic", "the kernels for Hopper GPUs"),
        ("auto", "it is old", None, "packed", "cuDNN's packed layout, as it is old"),
        ("auto", "it is old", "it is older", "mask", "a mask of all pairs of positions, as it is older"),
        ("cudnn", None, None, "packed", "cuDNN's packed layout, as cudnn is the backend"),
        ("xla", None, None, "mask", "a mask of all pairs of positions, as XLA computes attention"),
    ],
)
def test_the_best_form_that_can_run_is_taken(monkeypatch, backend, not_mosaic, not_packed, form, description):
    monkeypatch.setattr(api, "mosaic_problem", lambda *_, **__: not_mosaic)
    monkeypatch.setattr(api, "packed_problem", lambda *_: not_packed)
    q, k, *_ = draw()
    assert api.choose_form(q, k, causal=True, scale=1.0, backend=backend) == (form, description)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "options", "problem"),
    [
        ("bfloat16", 128, {}, None),
        ("float16", 128, {}, "bfloat16, not float16"),
        ("bfloat16", 96, {}, "64 or 128 features, not 96"),
        ("bfloat16", 64, {"causal": False}, "causal"),
        ("bfloat16", 64, {"scale": -1.0}, "above zero"),
    ],
)
def test_the_kernels_need_shapes_that_they_are_written_for(monkeypatch, dtype, head_dim, options, problem):
    monkeypatch.setattr(api, "hopper_unavailable_reason", lambda: None)
    found = api.mosaic_problem(dtype, head_dim, **options)
    assert found is None if problem is None else problem in found


@pytest.mark.usefixtures("hopper")
def test_a_device_without_the_packed_layout_says_that_it_builds_a_mask(monkeypatch, caplog):
    monkeypatch.setattr(api, "packed_problem", lambda *_: "it is old")
    monkeypatch.setattr(api, "mosaic_problem", lambda *_, **__: "it is not new")
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **__: q)
    q, k, v, _ = draw()
    with caplog.at_level(logging.INFO, logger=api.__name__):
        llama_attention.multihead_attention(
            q, k, v, jnp.zeros((3, LENGTH), int), contiguous_segments=True, backend="cudnn"
        )
    assert caplog.messages == ["Attention within documents: a mask of all pairs of positions, as it is old."]
