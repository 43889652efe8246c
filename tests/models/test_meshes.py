"""The same model everywhere: parameters, gradients and losses do not depend on the mesh."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from meshes import EXACT, make_mesh
from models import runs
from models.runs import MODEL_MESHES, PARALLEL, init, shaken, train_on, train_without_mesh, with_config

from xlstm_jax.configs import ConfigError
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.shared.layout import from_canonical, to_canonical
from xlstm_jax.models.shared.stack import Context
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.models.xlstm.slstm import SLSTMLayer

pytestmark = pytest.mark.slow

MODELS = {
    "xlstm": XLSTM(
        XLSTMConfig(vocab_size=64, embedding_dim=32, num_heads=4, num_blocks=2, chunk_size=8, parallel=PARALLEL)
    ),
    "xlstm of the paper": XLSTM(
        XLSTMConfig(
            vocab_size=64,
            embedding_dim=32,
            num_heads=4,
            num_blocks=4,
            block_kinds="xLSTM[1:1]",
            norm="layernorm",
            norm_eps=1e-5,
            logits_soft_cap=None,
            keep_logits=True,
            chunk_size=8,
            parallel=PARALLEL,
        )
    ),
    "xlstm with all norms": XLSTM(
        XLSTMConfig(
            vocab_size=64,
            embedding_dim=32,
            num_heads=4,
            num_blocks=3,
            block_kinds=("mlstm", "mlstm_up", "slstm"),
            paper_norm="rmsnorm",
            norm_eps=1e-2,  # With less, five steps amplify rounding beyond the tolerance, in post-norms above all.
            post_norm=True,
            qk_norm=True,
            qk_norm_scale=True,
            up_gate_soft_cap=5.0,
            chunk_size=8,
            parallel=PARALLEL,
        )
    ),
    "llama": LlamaTransformer(
        LlamaConfig(
            vocab_size=64,
            embedding_dim=32,
            num_blocks=2,
            head_dim=4,
            num_kv_heads=4,
            qk_norm=True,
            ffn_multiple_of=16,
            parallel=PARALLEL,
        )
    ),
}
on_meshes = pytest.mark.parametrize("mesh_name", MODEL_MESHES)
of_models = pytest.mark.parametrize("name", MODELS)


@functools.cache
def parameters_on(name, mesh_name):
    """Return the initial parameters on a mesh, whole."""
    return runs.parameters_on(MODELS[name], mesh_name)


@functools.cache
def without_mesh(name):
    """Return initial parameters, and the first gradients and the losses of a run from shaken ones."""
    model = MODELS[name]
    params = jax.jit(functools.partial(init, model), compiler_options=EXACT)(jax.random.key(3))
    start = jax.device_get(shaken(params))
    return jax.device_get(params), start, *train_without_mesh(model, start)


@of_models
@on_meshes
def test_a_seed_gives_the_same_parameters_bit_for_bit_on_every_mesh(name, mesh_name):
    jax.tree.map(np.testing.assert_array_equal, parameters_on(name, mesh_name), parameters_on(name, "dp8"))


@of_models
def test_a_seed_gives_the_same_parameters_to_an_ulp_without_a_mesh(name):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_max_ulp(a, b, maxulp=1),
        parameters_on(name, "dp8"),
        without_mesh(name)[0],
    )


@of_models
@on_meshes
def test_gradients_and_losses_are_the_same_on_every_mesh(name, mesh_name):
    _, start, expected_gradients, expected_losses = without_mesh(name)
    gradients, losses = train_on(MODELS[name], mesh_name, start)

    def compare(path, actual, expected):
        error = np.linalg.norm(actual - expected)
        assert error <= 1e-5 * np.linalg.norm(expected), f"{jax.tree_util.keystr(path)}: {error}"

    jax.tree_util.tree_map_with_path(compare, gradients, expected_gradients)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert losses[-1] < losses[0]


@of_models
def test_unrolled_blocks_have_the_parameters_of_scanned_ones(name):
    model = MODELS[name]
    scanned, unrolled = (
        jax.jit(functools.partial(init, with_config(model, scan_blocks=scan)))(jax.random.key(3))
        for scan in (True, False)
    )
    canonical = to_canonical(scanned, model.config.kinds, scan=True)
    jax.tree.map(np.testing.assert_array_equal, canonical, unrolled)
    back = from_canonical(canonical, model.config.kinds, scan=True)
    jax.tree.map(np.testing.assert_array_equal, back, scanned)


def test_heads_on_different_devices_do_not_drop_the_same_units(key):
    shape = {"vocab_size": 8, "embedding_dim": 32, "num_heads": 2, "num_blocks": 1}
    config = XLSTMConfig(**shape, block_kinds="slstm", dropout_rate=0.5)
    layer, is_dropout = SLSTMLayer(config), lambda module, _: isinstance(module, nn.Dropout)

    def dropped(x):
        variables = layer.init(key, x, None, Context())
        options = {"rngs": {"dropout": key}, "capture_intermediates": is_dropout, "mutable": ["intermediates"]}
        _, seen = layer.apply(variables, x, None, Context(train=True), **options)
        return seen["intermediates"]["Dropout_0"]["__call__"][0] == 0

    x, heads = jax.random.normal(key, (2, 16, 32)), P(None, None, "tp")
    run = jax.shard_map(dropped, mesh=make_mesh(tp=2), in_specs=P(), out_specs=heads, check_vma=False)
    first, second = np.moveaxis(np.asarray(jax.jit(run)(x)), 2, 0)
    assert 0.4 < np.mean(first == second) < 0.6


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"num_heads": 2}, "num_heads is 2, which 4 devices cannot share evenly: set parallel.model_axis_"),
        ({"ffn_dim": 66}, r"The parameter ffn\.gate\.kernel of shape \(32, 66\) cannot be split over 4 devic"),
    ],
    ids=["heads", "features"],
)
def test_sizes_that_devices_cannot_share_are_refused_by_their_names(fields, problem, key):
    model = with_config(MODELS["xlstm"], **fields)
    draw = jax.shard_map(
        functools.partial(init, model), mesh=make_mesh(tp=4), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(ConfigError, match=problem):
        jax.eval_shape(draw, key)
