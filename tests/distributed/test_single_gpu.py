"""One large batch as several small ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.core import freeze
from jax.sharding import PartitionSpec as P
from meshes import BATCH, make_mesh, run_sharded
from tolerances import assert_close

from xlstm_jax.common_types import TrainState
from xlstm_jax.dataset.batch import Batch, LLMBatch
from xlstm_jax.distributed import accumulate_gradients, shard_module_params, sync_gradients
from xlstm_jax.distributed.single_gpu import accumulate_gradients_loop, accumulate_gradients_scan

ROWS, FEATURES = 8, 3
VARIANTS = [accumulate_gradients_loop, accumulate_gradients_scan]


def state():
    model = nn.Dense(2)
    params = model.init(jax.random.key(1), jnp.zeros((1, FEATURES)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))


def batch(rows=ROWS):
    inputs = jax.random.normal(jax.random.key(2), (rows, FEATURES))
    return Batch(inputs=inputs, targets=inputs[:, :2] ** 2)


def loss_fn(params, apply_fn, batch, rng):
    noise = jax.random.normal(rng, ())
    error = jnp.square(apply_fn({"params": params}, batch.inputs) - batch.targets)
    metrics = {
        "loss": {"value": error.sum(), "count": error.size, "log_modes": ["mean", "std"]},
        "largest": {"value": error.max(), "count": 1, "log_modes": ["max"]},
        "noise": noise,
        "rows": len(batch.inputs),
        "is_finite": True,
    }
    return error.mean(), (metrics, {"first": batch.inputs[0], "noise": noise})


@pytest.mark.parametrize("accumulate", VARIANTS)
@pytest.mark.parametrize("num_minibatches", [1, 2, 4, 8])
def test_the_gradients_are_those_of_the_whole_batch(accumulate, num_minibatches):
    whole = jax.grad(lambda params: loss_fn(params, state().apply_fn, batch(), jax.random.key(0))[0])(state().params)
    run = jax.jit(functools.partial(accumulate, num_minibatches=num_minibatches, loss_fn=loss_only))
    gradients, _, _ = run(state(), batch(), jax.random.key(0))
    assert_close(gradients, whole)


def loss_only(*args):
    loss, _ = loss_fn(*args)
    return loss, ({}, None)


@pytest.mark.parametrize("accumulate", VARIANTS)
@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_metrics_are_summed_names_pass_and_variables_are_collected(accumulate, num_minibatches):
    key = jax.random.key(7)
    _, metrics, mutable_variables = accumulate(state(), batch(), key, num_minibatches, loss_fn)
    parts = [
        loss_fn(state().params, state().apply_fn, part, part_key)[1]
        for part, part_key in zip(split(batch(), num_minibatches), jax.random.split(key, num_minibatches), strict=True)
    ]
    assert metrics["loss"]["log_modes"] == ["mean", "std"]
    assert metrics["largest"]["log_modes"] == ["max"]
    assert metrics["loss"]["count"] == ROWS * 2
    assert metrics["rows"] == ROWS
    assert metrics["is_finite"] == num_minibatches
    assert_close(metrics["loss"]["value"], sum(part[0]["loss"]["value"] for part in parts))
    assert_close(metrics["largest"]["value"], max(part[0]["largest"]["value"] for part in parts))
    assert_close(metrics["noise"], sum(part[0]["noise"] for part in parts))
    if accumulate is accumulate_gradients_loop:
        mutable_variables = stack(mutable_variables)
    assert_close(mutable_variables, stack([part[1] for part in parts]))


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_the_loop_returns_the_variables_of_each_minibatch_and_the_scan_stacks_them(num_minibatches):
    run = functools.partial(accumulate_gradients, state(), batch(), jax.random.key(7), num_minibatches, loss_fn)
    (_, _, each), (_, _, stacked) = run(), run(use_scan=True)
    assert isinstance(each, list)
    assert [sorted(tree) for tree in each] == [["first", "noise"]] * num_minibatches
    assert each[0]["first"].shape == (FEATURES,)
    assert stacked["first"].shape == (num_minibatches, FEATURES)
    assert_close(stack(each), stacked)


def split(batch, num_minibatches):
    size = ROWS // num_minibatches
    return [batch[index * size : (index + 1) * size] for index in range(num_minibatches)]


@pytest.mark.parametrize("as_frozen", [False, True])
@pytest.mark.parametrize("accumulate", VARIANTS)
@pytest.mark.parametrize("num_minibatches", [1, 2, 8])
def test_maxima_and_small_types_do_not_depend_on_the_number_of_minibatches(accumulate, num_minibatches, as_frozen):
    def loss_fn(params, apply_fn, batch, rng):
        values = -jnp.abs(batch.inputs[:, 0])
        metrics = {
            "max": {"value": jnp.max(values) * 2, "count": 2, "log_modes": ["max"]},
            "flag": {"value": jnp.all(values < 0), "count": 1, "log_modes": ["mean"]},
            "byte": {"value": jnp.uint8(200), "count": 1, "log_modes": ["mean"]},
        }
        return jnp.sum(params["bias"]), (freeze(metrics) if as_frozen else metrics, None)

    _, metrics, _ = accumulate(state(), batch(), jax.random.key(0), num_minibatches, loss_fn)
    assert metrics["max"]["value"] == jnp.max(-jnp.abs(batch().inputs[:, 0]))
    assert metrics["max"]["count"] == 1
    assert metrics["flag"]["value"] == metrics["flag"]["count"] == num_minibatches
    assert metrics["byte"]["value"] == 200 * num_minibatches


@pytest.mark.parametrize("use_scan", [False, True])
def test_both_variants_return_the_same(use_scan):
    expected = accumulate_gradients_loop(state(), batch(), jax.random.key(0), 4, loss_fn)
    actual = accumulate_gradients(state(), batch(), jax.random.key(0), 4, loss_fn, use_scan=use_scan)
    expected = (*expected[:2], stack(expected[2]))
    actual = actual if use_scan else (*actual[:2], stack(actual[2]))
    names = [jax.tree.map(lambda x: x if isinstance(x, str) else None, tree) for tree in (actual, expected)]
    assert names[0] == names[1]
    numbers = [jax.tree.map(lambda x: None if isinstance(x, str) else x, tree) for tree in (actual, expected)]
    assert_close(*numbers)


@pytest.mark.parametrize("accumulate", VARIANTS)
@pytest.mark.parametrize("num_minibatches", [3, 0, -2, 16])
def test_a_batch_that_does_not_divide_is_refused_with_both_numbers(accumulate, num_minibatches):
    with pytest.raises(ValueError, match=rf"8 rows .* into {num_minibatches} minibatches"):
        accumulate(state(), batch(), jax.random.key(0), num_minibatches, loss_fn)


@pytest.mark.parametrize("accumulate", VARIANTS)
def test_batches_of_tokens_and_old_style_keys_work(accumulate):
    tokens = LLMBatch.from_inputs(jnp.arange(ROWS * 4).reshape(ROWS, 4))

    def loss_fn(params, apply_fn, batch, rng):
        x = batch.inputs[:, :FEATURES] + batch.get_document_borders()[:, :FEATURES]
        return apply_fn({"params": params}, x.astype(jnp.float32)).mean(), ({"keys": rng[0]}, None)

    gradients, _, mutable_variables = accumulate(state(), tokens, jax.random.PRNGKey(0), 2, loss_fn)
    assert mutable_variables == ([None, None] if accumulate is accumulate_gradients_loop else None)
    assert np.isfinite(gradients["kernel"]).all()


@pytest.mark.parametrize("accumulate", VARIANTS)
def test_accumulation_works_on_split_parameters_in_a_mesh(accumulate):
    mesh = make_mesh(dp=2, fsdp=4)
    model = shard_module_params(nn.Dense, "fsdp", min_weight_size=0)(4, use_bias=False)

    def loss_fn(params, apply_fn, batch, rng):
        loss = jnp.mean(jnp.square(apply_fn({"params": params}, batch.inputs)))
        return loss, ({"loss": {"value": loss, "count": 1, "log_modes": ["mean"]}}, None)

    def step(key, inputs):
        params = model.init(key, inputs)["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))
        gradients, _, _ = accumulate(state, Batch(inputs=inputs, targets=inputs), key, 2, loss_fn)
        return params, sync_gradients(gradients, mesh.axis_names)

    inputs = jax.random.normal(jax.random.key(1), (16, FEATURES))
    params, gradients = run_sharded(step, mesh, jax.random.key(0), inputs, in_specs=(P(), BATCH))
    assert gradients["kernel"].names == params["kernel"].names == (None, "fsdp")
    expected = jax.grad(lambda kernel: jnp.mean(jnp.square(inputs @ kernel)))(np.asarray(params["kernel"].value))
    assert_close(np.asarray(gradients["kernel"].value), expected)


def test_the_scan_is_compiled_once_for_all_minibatches():
    def num_matrix_products(num_minibatches, accumulate):
        run = functools.partial(accumulate, num_minibatches=num_minibatches, loss_fn=loss_only)
        return str(jax.make_jaxpr(run)(state(), batch(), jax.random.key(0))).count("dot_general")

    assert num_matrix_products(8, accumulate_gradients_scan) == num_matrix_products(2, accumulate_gradients_scan)
    assert num_matrix_products(8, accumulate_gradients_loop) == 4 * num_matrix_products(2, accumulate_gradients_loop)
