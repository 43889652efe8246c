"""Initialisers, wrappers and the head that models share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, on_mesh, run_sharded, unboxed_tree
from tolerances import assert_close

from xlstm_jax.distributed import split_array_over_mesh
from xlstm_jax.models.configs import ParallelConfig
from xlstm_jax.models.shared import (
    TPLMHead,
    create_common_init_fn,
    prepare_module,
    small_init,
    soft_cap_logits,
    uniform_init,
    wang_init,
)
from xlstm_jax.models.shared.norms import LayerNorm, MultiHeadNorm, RMSNorm


@pytest.mark.parametrize("distribution", ["normal", "truncated_normal", "uniform"])
@pytest.mark.parametrize(
    ("init", "stddev"),
    [
        (functools.partial(small_init, 40), np.sqrt(2 / 200)),
        (functools.partial(wang_init, 16, 4), 2 / 4 / 4),
        (functools.partial(create_common_init_fn, "wang2", 16, 4), 2 / 8 / 4),
        (functools.partial(create_common_init_fn, "small", 40, 4), np.sqrt(2 / 200)),
    ],
)
def test_an_initialiser_has_its_standard_deviation(init, stddev, distribution, key):
    values = init(distribution=distribution)(key, (200, 200), jnp.float32)
    np.testing.assert_allclose(np.std(values), stddev, rtol=0.02)
    np.testing.assert_allclose(np.mean(values), 0, atol=0.02 * stddev)
    if distribution == "uniform":
        assert np.abs(values).max() <= np.sqrt(3) * stddev * (1 + 1e-6)


def test_uniform_values_lie_between_their_bounds(key):
    values = uniform_init(2.0, 5.0)(key, (1000,), jnp.float32)
    assert 2.0 <= values.min() < 2.1
    assert 4.9 < values.max() <= 5.0


def test_a_head_norm_of_root_mean_squares_takes_those_of_each_head(key):
    x, scale = jax.random.normal(key, (2, 5, 3, 4)), jnp.arange(12.0)
    norm = MultiHeadNorm("tp", eps=0.5, norm="rmsnorm")
    expected = np.asarray(x) / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 0.5)
    assert_close(norm.apply({"params": {"scale": scale}}, x), expected.reshape(2, 5, 12) * np.asarray(scale))


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_initialiser_or_distribution_is_refused():
    with pytest.raises(ValueError, match="no initialiser 'large'"):
        create_common_init_fn("large", 4, 4)
    with pytest.raises(ValueError, match="no distribution 'cauchy'"):
        small_init(4, "cauchy")


def test_a_soft_cap_squashes_and_none_does_not():
    x = jnp.array([-100.0, 0.5, 100.0])
    assert_close(soft_cap_logits(x, 30.0), 30 * np.tanh(np.asarray(x) / 30))
    assert soft_cap_logits(x, None) is x


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_are_those_of_float64(dtype, key):
    x = (3 * jax.random.normal(key, (4, 64)) + 1).astype(dtype)
    wide = np.asarray(x, np.float64)
    rms = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6)
    layer = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    for norm, expected in ((RMSNorm(), rms), (LayerNorm(), layer)):
        y, _ = norm.init_with_output(key, x)
        assert y.dtype == dtype
        assert_close(y.astype(jnp.float32), expected, dtype=dtype)


def test_a_prepared_module_keeps_names_values_and_gradients(key):
    config = ParallelConfig(fsdp_modules=["Layer"], remat=["Layer"], fsdp_min_weight_size=0)

    class Network(nn.Module):
        parallel: ParallelConfig | None

        @nn.compact
        def __call__(self, x):
            return prepare_module(functools.partial(nn.Dense, 8), "Layer", self.parallel)()(x)

    x, mesh = jnp.ones((2, 4)), make_mesh(fsdp=4)

    def run(parallel, key):
        network = Network(parallel)
        variables = network.init(key, x)
        return variables, jax.grad(lambda v: jnp.sum(jnp.sin(network.apply(v, x))))(variables)

    prepared, plain = (run_sharded(functools.partial(run, p), mesh, key) for p in (config, None))
    assert prepared[0]["params"]["Dense_0"]["kernel"].names == (None, "fsdp")
    assert_close(unboxed_tree(prepared), unboxed_tree(plain))
    assert "Dense" in prepare_module(nn.Dense, "Other", config).__name__


@pytest.mark.parametrize("tp_size", [1, 4])
def test_the_parallel_head_gives_each_device_its_part_of_the_sequence(tp_size, key):
    config = ParallelConfig(model_axis_size=tp_size, fsdp_min_weight_size=0)
    head = TPLMHead(config, 16, nn.initializers.normal(1.0), RMSNorm, logits_soft_cap=5.0)
    x, mesh = jax.random.normal(key, (2, 8, 12)), make_mesh(tp=tp_size)

    def own(x):
        return split_array_over_mesh(x, "tp", split_axis=-1)

    params = run_sharded(lambda key, x: head.init(key, own(x)), mesh, key, x)
    specs = nn.get_partition_spec(params)
    logits = on_mesh(lambda p, x: head.apply(p, own(x)), mesh, (specs, P()), P(None, "tp"))(params, x)
    whole = unboxed_tree(params)["params"]
    normed = x / np.sqrt(np.mean(np.asarray(x) ** 2, -1, keepdims=True) + 1e-6)
    assert logits.shape == (2, 8, 16)
    assert_close(logits, 5 * np.tanh(normed @ whole["out_dense"]["kernel"] / 5))
