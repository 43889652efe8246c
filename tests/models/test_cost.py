"""What `models/cost.py` computes from a config is what the real models have and execute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

from xlstm_jax.models.configs import ParallelConfig
from xlstm_jax.models.cost import count_flops, model_cost
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.models.xlstm.config import published

pytestmark = pytest.mark.slow

BATCH, LENGTH = 3, 13
BASE = XLSTMConfig(
    vocab_size=24, embedding_dim=16, num_heads=2, num_blocks=2, chunk_size=8, ffn_dim=20, loss_chunk_size=16
)
LLAMA = LlamaConfig(
    vocab_size=24, embedding_dim=24, num_blocks=2, head_dim=6, num_kv_heads=2, ffn_dim=20, loss_chunk_size=16
)
KINDS = {
    "mlstm": BASE,
    "mlstm_up": dataclasses.replace(BASE, block_kinds="mlstm_up", ffn_dim=None),
    "slstm": dataclasses.replace(BASE, block_kinds="slstm", ffn_dim=None, chunk_size=64),
    "llama": LLAMA,
}
MIXED = dataclasses.replace(BASE, num_blocks=3, block_kinds=("mlstm", "mlstm_up", "slstm"))
CONFIGS = KINDS | {
    "mixed": MIXED,
    "pattern, tied": dataclasses.replace(BASE, num_blocks=4, block_kinds="xLSTM[1:1]", ffn_dim=None, tie_weights=True),
    "mixed, other sizes": dataclasses.replace(
        MIXED,
        num_heads=4,
        qk_dim_factor=1.0,
        v_dim_factor=2.0,
        use_bias=True,
        conv_kernel_size=3,
        qkv_block_size=8,
        dtype="bfloat16",
    ),
    "mixed, all norms": dataclasses.replace(
        MIXED, post_norm=True, qk_norm=True, qk_norm_scale=True, paper_norm="rmsnorm", up_gate_soft_cap=5.0
    ),
    "float8": dataclasses.replace(MIXED, dtype="bfloat16", float8=True),
    "kept logits": dataclasses.replace(BASE, keep_logits=True),
    "llama, other sizes": dataclasses.replace(
        LLAMA, num_kv_heads=None, tie_weights=True, use_bias=True, qk_norm=True, max_state_length=7, dtype="bfloat16"
    ),
}
of_configs = pytest.mark.parametrize("name", CONFIGS)


def build(config):
    """Return the model of a config."""
    return LlamaTransformer(config) if isinstance(config, LlamaConfig) else XLSTM(config)


def tokens(batch=BATCH, length=LENGTH):
    """Return the shape of a batch."""
    return jax.ShapeDtypeStruct((batch, length), jnp.int32)


@functools.cache
def variables(name, scan_blocks=True):
    """Return the shapes of the parameters of a model."""
    model = build(dataclasses.replace(CONFIGS[name], scan_blocks=scan_blocks))
    return jax.eval_shape(model.init, jax.random.key(0), tokens())


def check_flops(name, batch=BATCH, length=LENGTH, has_documents=False, **changes):
    """Compare the FLOPs of a config with those of the gradient of its model's loss, and of the loss itself."""
    config = dataclasses.replace(CONFIGS[name], **changes)

    def loss(variables, inputs):
        borders = inputs == 0 if has_documents else None
        losses, _ = build(config).apply(variables, inputs, document_borders=borders, targets=inputs)
        return jnp.mean(losses)

    args = variables(name, config.scan_blocks), tokens(batch, length)
    flops = model_cost(config, sequence_length=length, batch_size=batch).flops
    assert flops.forward == count_flops(loss, *args)
    assert flops.executed == count_flops(jax.grad(loss), *args)


@of_configs
def test_flops_are_those_of_the_training_loss(name):
    check_flops(name)


@pytest.mark.parametrize("remat", ["full", "dots", "norms"])
@pytest.mark.parametrize("kind", [*KINDS, "mixed, all norms"])
def test_what_a_policy_computes_again_is_counted(kind, remat):
    check_flops(kind, remat=remat)


@pytest.mark.parametrize("changes", [{"remat": "offload"}, {"parallel": ParallelConfig(remat=["Block", "LMHead"])}])
def test_what_is_moved_to_the_host_or_computed_again_by_name_is_counted(changes):
    check_flops("mixed", **changes)


def test_kept_logits_are_computed_again_with_the_head():
    check_flops("kept logits", parallel=ParallelConfig(remat=["LMHead"]))


@pytest.mark.parametrize(("name", "remat"), [*((kind, "full") for kind in KINDS), ("mlstm", "none"), ("mixed", "dots")])
def test_unrolled_blocks_count_as_scanned_ones(name, remat):
    check_flops(name, remat=remat, scan_blocks=False)


@pytest.mark.parametrize(
    ("name", "batch", "length"), [("mlstm", 1, 2), ("mlstm", 2, 5), ("mlstm", 2, 16), ("llama", 1, 17)]
)
def test_positions_that_fill_up_a_chunk_are_counted(name, batch, length):
    check_flops(name, batch, length)


@pytest.mark.parametrize("name", ["mixed", "llama"])
def test_borders_between_documents_are_counted(name):
    check_flops(name, has_documents=True, remat="dots")


@of_configs
def test_parameters_are_those_of_the_model(name):
    expected = sum(x.size for x in jax.tree.leaves(variables(name)))
    assert model_cost(CONFIGS[name], sequence_length=LENGTH).parameters == expected


@of_configs
def test_state_bytes_are_those_of_the_model(name):
    state = jax.eval_shape(lambda: build(CONFIGS[name]).init_state(1))
    expected = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert model_cost(CONFIGS[name], sequence_length=LENGTH).state_bytes == expected


def test_the_published_7b_has_its_number_of_parameters():
    assert model_cost(published("xLSTM-7B"), sequence_length=8192).parameters == 6_865_424_896


@pytest.mark.parametrize(
    ("name", "cell"),
    [("mlstm", 2 * BASE.qk_dim * BASE.v_dim // BASE.num_heads), ("llama", 2 * LENGTH * LLAMA.embedding_dim)],
)
def test_model_flops_are_six_for_each_parameter_of_a_product_and_for_each_product_of_a_cell(name, cell):
    params = variables(name, scan_blocks=False)["params"]
    matrices = [x.size for x in jax.tree.leaves((params["block_stack"], params["lm_head"])) if x.ndim == 2]
    cost = model_cost(CONFIGS[name], sequence_length=LENGTH, batch_size=BATCH)
    assert cost.flops_per_token.model == 6 * (sum(matrices) + CONFIGS[name].num_blocks * cell)


@pytest.mark.parametrize("changes", [{"chunk_size": 4}, {"remat": "full"}, {"loss_chunk_size": 7}])
def test_model_flops_do_not_depend_on_how_they_are_computed(changes):
    flops, changed = (
        model_cost(config, sequence_length=LENGTH).flops for config in (MIXED, dataclasses.replace(MIXED, **changes))
    )
    assert changed.model == flops.model
    assert changed.executed != flops.executed


def test_flops_per_token_are_those_of_a_batch_over_its_tokens():
    cost = model_cost(BASE, sequence_length=LENGTH, batch_size=BATCH)
    assert cost.num_tokens == BATCH * LENGTH
    assert cost.flops_per_token.executed * cost.num_tokens == pytest.approx(cost.flops.executed)


@pytest.mark.parametrize("sizes", [{"sequence_length": 1}, {"sequence_length": 8, "batch_size": 0}])
def test_a_batch_that_nobody_can_train_on_is_refused(sizes):
    with pytest.raises(ValueError, match="at least two tokens"):
        model_cost(BASE, **sizes)


A, B = jnp.ones((2, 3)), jnp.ones((3, 4))
PRODUCT = 2 * 2 * 3 * 4


def test_a_product_counts_two_for_each_multiply_add():
    assert count_flops(jnp.matmul, A, B) == PRODUCT
    assert count_flops(jnp.matmul, jnp.ones((5, 2, 3)), jnp.ones((5, 3, 4))) == 5 * PRODUCT
    assert count_flops(lambda a, b: jnp.tanh(a) + b, A, A) == 0


def test_the_gradient_of_a_product_is_two_products():
    assert count_flops(jax.grad(lambda a, b: jnp.sum(jnp.sin(a @ b)), argnums=(0, 1)), A, B) == 3 * PRODUCT


def repeated(length, body):
    """Return a function that runs another a number of times, in a scan."""
    return lambda *args: lax.scan(lambda carry, _: (carry, body(*args)), None, length=length)[1]


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    assert count_flops(repeated(7, jnp.matmul), A, B) == 7 * PRODUCT
    assert count_flops(repeated(5, repeated(7, jnp.matmul)), A, B) == 35 * PRODUCT
    assert count_flops(lambda a, b: lax.map(lambda row: row @ b, a), A, B) == PRODUCT


def test_the_dearest_branch_of_a_cond_counts():
    def branches(a, b):
        return lax.cond(jnp.sum(a) > 0, jnp.matmul, lambda a, b: 2 * (a @ b) + a @ (b + 1), a, b)

    assert count_flops(branches, A, B) == 2 * PRODUCT
    assert count_flops(repeated(3, branches), A, B) == 6 * PRODUCT


def with_jvp(function):
    """Return the function with a derivative by hand."""
    function = jax.custom_jvp(function)
    function.defjvps(None, None)
    return function


def with_vjp(function):
    """Return the function with a backward pass by hand, which gives back the arguments."""
    custom = jax.custom_vjp(function)
    custom.defvjp(lambda *args: (function(*args), args), lambda args, _: args)
    return custom


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, with_jvp, with_vjp])
def test_products_within_other_functions_count(wrap):
    inner = wrap(lambda a, b: jnp.sin(a @ b))
    assert count_flops(lambda a, b: jnp.cos(inner(a, b)), A, B) == PRODUCT


def test_what_is_computed_again_counts_again():
    def loss(a, b):
        return jnp.sum(jax.checkpoint(lambda a, b: jnp.sin(a @ b))(a, b))

    assert count_flops(jax.grad(loss, argnums=(0, 1)), A, B) == 4 * PRODUCT


def test_the_products_of_one_device_count():
    mesh = make_mesh(dp=2)
    split = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    assert count_flops(split, A, B) == PRODUCT // 2


def test_a_loop_of_unknown_length_is_refused_if_it_multiplies():
    def loop(body, a):
        return lax.while_loop(lambda a: jnp.sum(a) < 10, body, a)

    assert count_flops(functools.partial(loop, lambda a: a + 1), A) == 0
    with pytest.raises(ValueError, match="use a scan"):
        count_flops(functools.partial(loop, lambda a: a @ jnp.ones((3, 3))), A)


def test_products_that_cannot_be_seen_are_refused():
    with pytest.raises(ValueError, match="'conv_general_dilated' cannot be counted"):
        count_flops(lambda a: jnp.convolve(a, a), jnp.ones(3))

    def kernel(a_ref, out_ref):
        out_ref[...] = a_ref[...]

    with pytest.raises(ValueError, match="'pallas_call' cannot be counted"):
        count_flops(pl.pallas_call(kernel, jax.ShapeDtypeStruct(A.shape, A.dtype)), A)
