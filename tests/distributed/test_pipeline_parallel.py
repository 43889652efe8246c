"""A stack of layers in stages against the same stack on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import BATCH, make_mesh, on_mesh, run_sharded
from tolerances import assert_close

from xlstm_jax.distributed import ModelParallelismWrapper, PipelineModule, sync_gradients

STAGES, LAYERS_PER_STAGE, FEATURES, ROWS = 4, 2, 6, 16
MESH = make_mesh(dp=2, pp=STAGES)


class Stage(nn.Module):
    """Residual layers; the square root has an infinite slope at zero inputs."""

    @nn.compact
    def __call__(self, x, scale=1.0):
        for index in range(LAYERS_PER_STAGE):
            norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True))
            x = x + scale * nn.Dense(FEATURES, name=f"layer_{index}")(jnp.tanh(x / norm))
        return x


def pipeline(num_microbatches):
    stage = functools.partial(PipelineModule, "pp", num_microbatches, Stage)
    return ModelParallelismWrapper("pp", stage)


def data():
    generator = np.random.default_rng(0)
    return tuple(jnp.asarray(generator.normal(size=(ROWS, FEATURES)), jnp.float32) for _ in range(2))


@functools.cache
def on_one_device():
    """Parameters stacked over the stages, the output of all stages in turn, and the gradients of its loss."""
    x, y = data()
    init = lambda key: pipeline(1).init(key, x[:1])["params"]  # noqa: E731
    params = jax.tree.map(np.asarray, run_sharded(init, MESH, jax.random.key(0)))

    def loss(params, x, y):
        for stage in range(STAGES):
            own = jax.tree.map(lambda p, stage=stage: p[stage], nn.unbox(params)["sharded"]["Stage_0"])
            x = Stage().apply({"params": own}, x, 0.5)
        return jnp.mean(jnp.square(x - y)), x

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(params, x, y)
    return params, output, gradients


@pytest.mark.parametrize("shares_output", [True, False], ids=["output shared", "loss on the last stage"])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
def test_a_pipeline_computes_the_outputs_and_gradients_of_the_whole_stack(num_microbatches, shares_output):
    params, expected_output, expected_gradients = on_one_device()
    module, (x, y) = pipeline(num_microbatches), data()

    def step(params, x, y):
        def loss(params):
            output = module.apply({"params": params}, x, 0.5)
            shared = lax.psum(output, "pp")
            if shares_output:
                return jnp.mean(jnp.square(shared - y)), shared
            is_last = lax.axis_index("pp") == STAGES - 1
            return jnp.where(is_last, STAGES * jnp.mean(jnp.square(output - y)), 0.0), shared

        gradients, output = jax.grad(loss, has_aux=True)(params)
        return nn.Partitioned(output, (("dp", "fsdp"), None)), sync_gradients(gradients, MESH.axis_names)

    specs = nn.get_partition_spec(params)
    output, gradients = run_sharded(step, MESH, params, x, y, in_specs=(specs, BATCH, BATCH))
    assert_close(output.value, expected_output)
    assert_close(jax.tree.map(np.asarray, gradients), expected_gradients)


def test_each_stage_and_microbatch_draws_its_own_dropout():
    class Drop(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dropout(0.5, deterministic=False)(jnp.ones_like(x))

    module = PipelineModule("pp", 4, Drop)
    x = jnp.zeros((8, 256))
    run = on_mesh(lambda key, x: lax.psum(module.apply({}, x, rngs={"dropout": key}), "pp"), make_mesh(pp=4))
    correlation = np.corrcoef(np.asarray(run(jax.random.key(0), x))) - np.eye(8)
    assert np.abs(correlation).max() < 0.3


def test_a_stage_that_changes_the_dtype_is_refused():
    stage = functools.partial(nn.Dense, FEATURES, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match=r"float32 .* returned bfloat16"):
        PipelineModule("pp", 1, stage).init(jax.random.key(0), data()[0])


def test_only_the_last_stage_has_the_output():
    module, (x, _) = pipeline(2), data()
    outputs = run_sharded(
        lambda key, x: nn.Partitioned(module.init_with_output(key, x)[0][None], ("pp", ("dp", "fsdp"), None)),
        MESH,
        jax.random.key(0),
        x,
        in_specs=(P(), BATCH),
    ).value
    assert not np.any(outputs[:-1])
    assert np.all(outputs[-1])


def test_a_pipeline_without_a_mesh_runs_its_one_stage():
    x, _ = data()
    module = PipelineModule("pp", 4, Stage)
    output, variables = module.init_with_output(jax.random.key(0), x)
    assert_close(output, Stage().apply({"params": variables["params"]["Stage_0"]}, x))


def test_a_batch_that_the_microbatches_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="16 rows cannot be split into 3 microbatches"):
        PipelineModule("pp", 3, Stage).init(jax.random.key(0), data()[0])


def test_a_stage_that_changes_the_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape of its input \(16, 6\), but returned \(16, 7\)"):
        PipelineModule("pp", 1, functools.partial(nn.Dense, 7)).init(jax.random.key(0), data()[0])
