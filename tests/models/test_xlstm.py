"""The xLSTM model: state, documents, losses, dropout, layouts, sizes, and what it refuses."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models.runs import shaken, tokens, with_config
from tolerances import assert_close

from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.shared.remat_names import STREAM
from xlstm_jax.models.configs import ModelConfig, ParallelConfig
from xlstm_jax.models.cost import count_flops
from xlstm_jax.models.shared.layout import to_canonical
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.models.xlstm.config import published

pytestmark = pytest.mark.slow

VOCAB = 24
BASE = XLSTMConfig(vocab_size=VOCAB, embedding_dim=16, num_heads=2, num_blocks=2, chunk_size=8)
KINDS = {
    "mlstm": BASE,
    "mlstm, sigmoid gate, qk norm, biases": dataclasses.replace(
        BASE, input_gate="sigmoid", qk_norm=True, use_bias=True, gate_soft_cap=None
    ),
    "mlstm, post norm, scaled qk norm": dataclasses.replace(BASE, post_norm=True, qk_norm=True, qk_norm_scale=True),
    "mlstm_up": dataclasses.replace(BASE, block_kinds="mlstm_up", norm="layernorm"),
    "slstm": dataclasses.replace(BASE, block_kinds="slstm", norm="layernorm", chunk_size=64),
    "mixed, other norms": dataclasses.replace(
        BASE,
        num_blocks=2,
        block_kinds=("slstm", "mlstm_up"),
        paper_norm="rmsnorm",
        post_norm=True,
        up_gate_soft_cap=5.0,
    ),
    "mixed": dataclasses.replace(BASE, num_blocks=3, block_kinds=("mlstm", "slstm", "mlstm_up")),
}
of_kinds = pytest.mark.parametrize("kind", KINDS)
TOKENS, TARGETS = tokens(VOCAB, rows=2, length=13)


@functools.cache
def ready(kind, scan_blocks=True):
    """Return a model with parameters that all matter, and its jitted apply."""
    model = XLSTM(dataclasses.replace(KINDS[kind], scan_blocks=scan_blocks))
    params = shaken(jax.jit(model.init)(jax.random.key(0), TOKENS[:, :2])["params"])
    return model, {"params": params}, jax.jit(model.apply, static_argnames=("return_state", "train"))


@of_kinds
def test_a_split_sequence_gives_the_logits_and_the_state_of_a_whole_one(kind):
    _, variables, apply = ready(kind)
    whole, end = apply(variables, TOKENS, return_state=True)
    first, middle = apply(variables, TOKENS[:, :5], return_state=True)
    second, end_of_second = apply(variables, TOKENS[:, 5:], state=middle, return_state=True)
    assert_close(jnp.concatenate([first, second], axis=1), whole)
    assert_close(end_of_second, end)


@of_kinds
def test_prefill_and_decoding_give_the_logits_of_the_full_pass(kind):
    _, variables, apply = ready(kind)
    logits, state = apply(variables, TOKENS[:, :4], return_state=True)
    steps = [logits]
    for position in range(4, TOKENS.shape[1]):
        logits, state = apply(variables, TOKENS[:, position : position + 1], state=state, return_state=True)
        steps.append(logits)
    assert_close(jnp.concatenate(steps, axis=1), apply(variables, TOKENS))


@of_kinds
def test_an_empty_state_gives_the_logits_of_none(kind):
    model, variables, apply = ready(kind)
    logits, _ = apply(variables, TOKENS, state=model.init_state(TOKENS.shape[0]), return_state=True)
    assert_close(logits, apply(variables, TOKENS))


def test_scales_of_one_change_nothing_in_a_norm_of_queries_and_keys():
    model, variables, apply = ready("mlstm, post norm, scaled qk norm")
    layer = variables["params"]["block_stack"]["block"]["mlstm"]
    assert layer["q_norm"]["scale"].shape == layer["k_norm"]["scale"].shape == (2, model.config.qk_dim // 2)
    scales = {name: {"scale": jnp.ones_like(layer[name]["scale"])} for name in ("q_norm", "k_norm")}
    blocks = variables["params"]["block_stack"]["block"]
    plain_layer = {name: part for name, part in layer.items() if name not in scales}

    def with_layer(own):
        return {"params": variables["params"] | {"block_stack": {"block": blocks | {"mlstm": own}}}}

    expected = with_config(model, qk_norm_scale=False).apply(with_layer(plain_layer), TOKENS)
    assert_close(apply(with_layer(layer | scales), TOKENS), expected)
    assert not np.allclose(apply(variables, TOKENS), expected, atol=1e-2)


@pytest.mark.parametrize("kind", ["mlstm, post norm, scaled qk norm", "mixed, other norms"])
def test_all_that_a_block_adds_goes_through_its_post_norms(kind):
    _, variables, apply = ready(kind)

    def without_post_norms(path, leaf):
        is_post_norm = any("post_norm" in str(key) for key in path)
        return jnp.zeros_like(leaf) if is_post_norm else leaf

    silent = jax.tree_util.tree_map_with_path(without_post_norms, variables)
    permuted = jnp.roll(TOKENS, 1, axis=1)  # What a token gives does not depend on those before it any more.
    assert_close(jnp.roll(apply(silent, TOKENS), 1, axis=1), apply(silent, permuted))


@pytest.mark.parametrize("return_state", [False, True])
def test_no_cell_has_a_state_that_nobody_asks_for(return_state, monkeypatch):
    model, variables, _ = ready("mixed")
    asked = []

    def recorded(*inputs, **options):
        asked.append((options["state"], options["return_state"]))
        return mlstm(*inputs, **options)

    monkeypatch.setattr("xlstm_jax.models.xlstm.mlstm.mlstm", recorded)
    jax.eval_shape(functools.partial(model.apply, return_state=return_state), variables, TOKENS)
    assert asked == [(None, return_state)] * 2


@pytest.mark.parametrize(
    ("kind", "scan_blocks"), [("mlstm", True), ("mlstm", False), ("slstm", False), ("mixed", False)]
)
def test_the_last_logits_alone_are_those_of_the_full_pass(kind, scan_blocks):
    model, variables, apply = ready(kind, scan_blocks)
    logits, state = apply(variables, TOKENS, return_state=True)
    run = jax.jit(functools.partial(model.apply, last_only=True, return_state=True))
    last, last_state = run(variables, TOKENS)
    assert_close(last, logits[:, -1:])
    assert_close(last_state, state)


def test_for_the_last_logits_the_last_block_computes_one_position_once_its_cell_is_done():
    model, variables, _ = ready("mlstm", scan_blocks=False)
    block = variables["params"]["block_stack"]["block_1"]
    per_position = [block["mlstm"]["out"], block["ffn"], variables["params"]["lm_head"]]
    numbers = sum(x.size for x in jax.tree.leaves(per_position) if x.ndim == 2)
    whole, last = (
        count_flops(functools.partial(model.apply, last_only=last_only), variables, TOKENS)
        for last_only in (False, True)
    )
    assert whole - last == 2 * numbers * (TOKENS.size - len(TOKENS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": TARGETS.T}, r"targets has shape \(13, 2\), but tokens has shape \(2, 13\)"),
        ({"document_borders": TOKENS[:, :4]}, r"document_borders has shape \(2, 4\)"),
        ({"targets": TARGETS, "last_only": True}, "Losses are those of all positions"),
    ],
)
def test_arrays_that_do_not_belong_to_the_tokens_are_refused(options, message):
    model, variables, _ = ready("mlstm")
    with pytest.raises(ValueError, match=message):
        model.apply(variables, TOKENS, **options)


@pytest.mark.parametrize("kind", ["mlstm", "mixed"])
def test_a_model_in_float64_goes_on_from_its_own_state(kind):
    with jax.enable_x64(True):
        model = with_config(XLSTM(KINDS[kind]), dtype="float64", param_dtype="float64", gate_dtype="float64")
        variables = jax.jit(model.init)(jax.random.key(0), TOKENS[:, :2])
        apply = jax.jit(functools.partial(model.apply, return_state=True))
        _, state = apply(variables, TOKENS[:, :5])
        second, _ = apply(variables, TOKENS[:, 5:], state=state)
        assert_close(second, apply(variables, TOKENS)[0][:, 5:], dtype="float64")


@of_kinds
def test_packed_documents_give_the_logits_of_separate_ones(kind):
    _, variables, apply = ready(kind)
    borders = (0, 5, 6, 13)
    marks = jnp.zeros(TOKENS.shape, bool).at[:, jnp.array(borders[1:-1])].set(True)
    packed, state = apply(variables, TOKENS, document_borders=marks, return_state=True)
    parts = [apply(variables, TOKENS[:, a:b], return_state=True) for a, b in itertools.pairwise(borders)]
    assert_close(packed, jnp.concatenate([logits for logits, _ in parts], axis=1))
    assert_close(state, parts[-1][1])
    assert np.abs(packed - apply(variables, TOKENS)).max() > 1e-2


@of_kinds
def test_a_single_token_that_starts_a_document_ignores_the_state(kind):
    _, variables, apply = ready(kind)
    _, state = apply(variables, TOKENS, return_state=True)
    token, starts = TOKENS[:, :1], jnp.ones((2, 1), bool)
    fresh, _ = apply(variables, token, return_state=True)
    logits, _ = apply(variables, token, state=state, document_borders=starts, return_state=True)
    continued, _ = apply(variables, token, state=state, document_borders=~starts, return_state=True)
    assert_close(logits, fresh)
    assert float(jnp.max(jnp.abs(continued - fresh))) > 1e-3


@of_kinds
def test_no_logit_depends_on_a_later_token(kind):
    _, variables, apply = ready(kind)
    changed = apply(variables, TOKENS.at[:, 7:].set(1))
    assert_close(changed[:, :7], apply(variables, TOKENS)[:, :7])
    assert np.abs(changed - apply(variables, TOKENS))[:, 7:].max() > 1e-2


@of_kinds
def test_losses_and_hits_are_those_of_the_logits(kind):
    model, variables, apply = ready(kind)
    logits = apply(variables, TOKENS)
    for chunk_size in (5, 1024):
        in_chunks = jax.jit(with_config(model, loss_chunk_size=chunk_size).apply)
        losses, hits = in_chunks(variables, TOKENS, targets=TARGETS)
        assert_close(losses, optax.softmax_cross_entropy_with_integer_labels(logits, TARGETS))
        np.testing.assert_array_equal(hits, jnp.argmax(logits, axis=-1) == TARGETS)


@of_kinds
def test_unrolled_blocks_compute_what_scanned_ones_do(kind):
    model, variables, apply = ready(kind)
    unrolled = with_config(model, scan_blocks=False)
    params = to_canonical(variables["params"], model.config.kinds, model.config.scan_blocks)
    assert_close(unrolled.apply({"params": params}, TOKENS), apply(variables, TOKENS))


def test_what_is_kept_and_what_is_computed_again_changes_no_gradient():
    model, variables, _ = ready("mixed")

    def gradient(model):
        loss = lambda v: jnp.mean(model.apply(v, TOKENS, targets=TARGETS)[0])  # noqa: E731
        return jax.jit(jax.grad(loss))(variables)

    expected = gradient(model)
    for changes in (
        {"remat": "dots"},
        {"remat": "norms"},
        {"parallel": ParallelConfig(remat=["Block", "LMHead"])},
        {"keep_logits": True},
    ):
        assert_close(gradient(with_config(model, **changes)), expected)


@pytest.mark.parametrize("remat", ["dots", "norms"])
def test_the_residual_stream_is_kept_in_place_of_the_products_that_are_added(remat, capsys):
    model, *_ = ready("mlstm")
    model = with_config(model, remat=remat, scan_blocks=False)
    variables = model.init(jax.random.key(0), TOKENS)
    jax.ad_checkpoint.print_saved_residuals(lambda v: jnp.sum(model.apply(v, TOKENS)), variables)
    printed = capsys.readouterr().out
    projections = ("q", "k", "v", "ogate", "igate", "fgate", "gate", "up")  # but neither `out` nor `down`
    assert printed.count("output of dot_general") == len(projections) * BASE.num_blocks
    assert printed.count(STREAM) == 2 * BASE.num_blocks


def test_the_loss_never_holds_all_logits():
    model = XLSTM(dataclasses.replace(BASE, vocab_size=4096, loss_chunk_size=32))
    inputs = jnp.zeros((4, 256), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def temporaries(loss):
        return jax.jit(jax.grad(loss)).lower(variables).compile().memory_analysis().temp_size_in_bytes

    chunked = temporaries(lambda v: jnp.mean(model.apply(v, inputs, targets=inputs)[0]))
    whole = temporaries(
        lambda v: jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model.apply(v, inputs), inputs))
    )
    logits = inputs.size * 4096 * 4
    assert chunked < logits / 2 < whole


def test_logits_are_kept_for_gradients_alone():
    model, variables, _ = ready("mixed")
    model = with_config(model, keep_logits=True, head_dtype="bfloat16")
    loss = lambda v: jnp.mean(model.apply(v, TOKENS, targets=TARGETS)[0])  # noqa: E731
    assert "f16[" in str(jax.make_jaxpr(jax.grad(loss))(variables)).replace("bf16[", "")
    assert "f16[" not in str(jax.make_jaxpr(loss)(variables)).replace("bf16[", "")


def test_dropout_is_on_in_training_only():
    model, variables, _ = ready("mixed")
    model = with_config(model, dropout_rate=0.5, embedding_dropout=True)
    apply = functools.partial(model.apply, variables, TOKENS)
    assert_close(apply(rngs={"dropout": jax.random.key(1)}), apply())
    first, second = (apply(train=True, rngs={"dropout": jax.random.key(key)}) for key in (1, 2))
    assert np.abs(first - second).max() > 1e-2


def test_tied_weights_share_the_embedding():
    model = XLSTM(dataclasses.replace(BASE, tie_weights=True, logits_soft_cap=None))
    variables = model.init(jax.random.key(0), TOKENS)
    assert "out_dense" not in variables["params"]["lm_head"]
    untied = with_config(model, tie_weights=False)
    kernel = variables["params"]["token_embedding"]["embedding"].T
    lm_head = variables["params"]["lm_head"] | {"out_dense": {"kernel": kernel}}
    params = variables["params"] | {"lm_head": lm_head}
    assert_close(model.apply(variables, TOKENS), untied.apply({"params": params}, TOKENS))


def test_soft_caps_bound_the_logits_and_none_leaves_them():
    model, variables, apply = ready("mlstm")
    free = with_config(model, logits_soft_cap=None).apply(variables, TOKENS)
    assert_close(apply(variables, TOKENS), 30 * jnp.tanh(free / 30))
    assert np.abs(with_config(model, logits_soft_cap=0.1).apply(variables, TOKENS)).max() <= 0.1


def test_precisions_are_kept_apart():
    model = XLSTM(dataclasses.replace(BASE, dtype="bfloat16", head_dtype="bfloat16", block_kinds="xLSTM[1:1]"))
    variables = model.init(jax.random.key(0), TOKENS)
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype("float32")}
    logits, state = model.apply(variables, TOKENS, return_state=True)
    assert logits.dtype == jnp.float32
    assert state[0].cell.memory.dtype == jnp.float32
    exact = with_config(model, dtype="float32", head_dtype="float32").apply(variables, TOKENS)
    assert_close(logits, exact, dtype="bfloat16")


SPREADS = ("std", "abs_max")
OF_GATES = {f"{part}_preact" for gate in ("igate", "fgate") for part in (f"max_{gate}", f"min_{gate}", f"mean_{gate}")}
OF_MLSTM = {f"{name}_{part}" for name in "qkv" for part in (*SPREADS, "mean")} | OF_GATES | {"igate_bias", "fgate_bias"}
OF_MLSTM |= {f"h_state{stage}_{part}" for stage in ("", "_norm", "_out") for part in SPREADS}
STATISTICS = {
    "mlstm": {"mlstm": OF_MLSTM | {"mean_output_gate"}},
    "mlstm_up": {"mlstm": OF_MLSTM},
    "slstm": {"slstm": {f"h_state{stage}_{part}" for stage in ("", "_norm") for part in SPREADS}},
}


@functools.cache
def sown_by(kind):
    """Run a model, and return what its blocks sow and their parameters."""
    model, variables, _ = ready(kind)
    _, sown = model.apply(variables, TOKENS, mutable=["intermediates"])
    return sown["intermediates"]["block_stack"]["block"], variables["params"]["block_stack"]["block"]


@pytest.mark.parametrize("kind", STATISTICS)
def test_a_block_sows_these_statistics_and_no_others(kind):
    sown, _ = sown_by(kind)
    of_layers = {name: set(value) for name, value in sown.items() if isinstance(value, dict)}
    assert of_layers == STATISTICS[kind]
    assert sown.keys() - of_layers.keys() == {"block_output_std", "block_output_abs_max"}
    assert all(x.shape == (2,) and x.dtype == jnp.float32 for x in jax.tree.leaves(sown))


def test_statistics_are_those_of_the_arrays_they_are_named_after():
    sown, params = (jax.device_get(tree) for tree in sown_by("mlstm"))
    actual = {name: value[0][0] for name, value in sown["mlstm"].items()}
    layer = jax.tree.map(lambda x: x[0], params["mlstm"])
    x = np.asarray(ready("mlstm")[1]["params"]["token_embedding"]["embedding"])[TOKENS]
    x = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + BASE.norm_eps) * params["norm_mlstm"]["scale"][0]
    q, k, v, ogate = (x @ layer[name]["kernel"] for name in ("q", "k", "v", "ogate"))
    gates = {name: 15 * np.tanh((x @ layer[name]["kernel"] + layer[name]["bias"]) / 15) for name in ("igate", "fgate")}
    heads = [y.reshape(*y.shape[:2], BASE.num_heads, -1) for y in (q, k, v)]
    hidden = np.asarray(mlstm(*map(jnp.asarray, (*heads, *gates.values())), backend="reference"))
    centred = hidden - hidden.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + BASE.norm_eps)
    normed = normed.reshape(v.shape) * layer["multihead_norm"]["scale"]
    output_gate = 1 / (1 + np.exp(-ogate))

    spreads = {"q": q, "k": k, "v": v, "h_state": hidden, "h_state_norm": normed, "h_state_out": output_gate * normed}
    expected = {f"{name}_std": np.std(y) for name, y in spreads.items()}
    expected |= {f"{name}_abs_max": np.abs(y).max() for name, y in spreads.items()}
    expected |= {f"{name}_mean": spreads[name].mean() for name in "qkv"} | {"mean_output_gate": output_gate.mean()}
    for name, gate in gates.items():
        expected |= {f"{part}_{name}_preact": getattr(np, part)(gate) for part in ("max", "min", "mean")}
        expected[f"{name}_bias"] = layer[name]["bias"].mean()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, err_msg=name)


def test_statistics_cost_nothing_where_nobody_asks_for_them():
    model, variables, _ = ready("mlstm")
    asked, unasked = (
        str(jax.make_jaxpr(lambda v, mutable=mutable: model.apply(v, TOKENS, mutable=mutable))(variables))
        for mutable in (["intermediates"], [])
    )
    assert "reduce_min" in asked
    assert "reduce_min" not in unasked


def test_the_published_7b_has_its_number_of_parameters():
    config = published("xLSTM-7B")
    shapes = jax.eval_shape(XLSTM(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 8), jnp.int32))
    assert sum(x.size for x in jax.tree.leaves(shapes["params"])) == 6_865_424_896


def test_patterns_spell_out_the_kinds_of_blocks():
    kinds = dataclasses.replace(BASE, num_blocks=6, block_kinds="xLSTM[2:1]").kinds
    assert kinds == ("mlstm_up", "mlstm_up", "slstm") * 2
    assert BASE.kinds == ("mlstm", "mlstm")


def test_the_config_survives_the_metadata_of_a_checkpoint():
    config = ModelConfig(model_class=XLSTM, parallel=ParallelConfig(), model_config=KINDS["mixed"])
    restored = ModelConfig.from_metadata(json.dumps({"model": config.to_dict()}))
    assert restored.model_class is XLSTM
    assert restored.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "qk_dim 8 is no multiple of num_heads 3"),
        ({"block_kinds": "lstm"}, "must be of the kinds attention, mlstm, mlstm_up, slstm"),
        ({"block_kinds": "xLSTM[2:1]"}, "num_blocks is 2"),
        ({"block_kinds": ("mlstm",)}, "num_blocks is 2"),
        ({"block_kinds": "xLSTM[0:0]"}, "must be of the kinds"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"dtype": "int32"}, "dtype is 'int32'"),
        ({"dropout_rate": 1.0}, "dropout_rate is 1.0"),
        ({"remat": "some"}, "remat is 'some'"),
        ({"parallel": ParallelConfig(fsdp_modules=["Blok"])}, "fsdp_modules names 'Blok'"),
        ({"parallel": ParallelConfig(tp_async_dense=True)}, "no ring to hide"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'"),
        ({"block_kinds": "mlstm_up", "qkv_block_size": 5}, "no multiple of qkv_block_size 5"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_an_impossible_config_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (4,)])
def test_tokens_of_an_impossible_shape_are_refused(shape):
    with pytest.raises(ValueError, match="at least one token"):
        XLSTM(BASE).init(jax.random.key(0), jnp.zeros(shape, jnp.int32))


def test_a_state_of_another_model_is_refused():
    _, variables, _ = ready("mlstm")
    model, other = XLSTM(BASE), XLSTM(dataclasses.replace(BASE, num_heads=1))
    with pytest.raises(ValueError, match="state is not one of this model"):
        model.apply(variables, TOKENS, state=other.init_state(2))
    with pytest.raises(ValueError, match="state is not one of this model"):
        model.apply(variables, TOKENS, state=model.init_state(3))


def test_an_unknown_published_size_is_refused():
    with pytest.raises(ValueError, match="xLSTM-7B"):
        published("xLSTM-8B")
