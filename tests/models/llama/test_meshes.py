"""The same Llama everywhere: parameters, gradients and decoding do not depend on the mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import BATCH, make_mesh, on_mesh, run_sharded, unboxed_tree
from models.llama.builds import named
from models.runs import MODEL_MESHES, PARALLEL, init, mean_loss, tokens
from tolerances import assert_close, assert_close_by_norm

from xlstm_jax.distributed import sync_gradients
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer

MODEL = LlamaTransformer(
    LlamaConfig(
        vocab_size=32,
        embedding_dim=32,
        num_blocks=2,
        head_dim=4,
        num_kv_heads=4,
        qk_norm=True,
        ffn_dim=32,
        max_state_length=16,
        parallel=PARALLEL,
    )
)
MESHES = [name for name in MODEL_MESHES if name != "one device"]
KEY = 3


@functools.cache
def step_on(mesh_name):
    """Return the initial parameters on a mesh, and their gradients."""
    mesh = make_mesh(**MODEL_MESHES[mesh_name])

    def device_program(key, inputs, targets):
        params = init(MODEL, key)
        gradients = jax.grad(lambda params: mean_loss(MODEL, params, inputs, targets))(params)
        return params, sync_gradients(gradients, mesh.axis_names)

    batch = tokens(MODEL.config.vocab_size)
    results = run_sharded(device_program, mesh, jax.random.key(KEY), *batch, in_specs=(P(), BATCH, BATCH))
    return tuple(named(unboxed_tree(tree)) for tree in results)


@functools.cache
def step_without_mesh():
    """Return the initial parameters where there is no mesh, and their gradients."""
    params = jax.jit(functools.partial(init, MODEL))(jax.random.key(KEY))
    batch = tokens(MODEL.config.vocab_size)
    gradients = jax.jit(jax.grad(lambda params: mean_loss(MODEL, params, *batch)))(params)
    return params, named(gradients)


@pytest.mark.parametrize("mesh_name", MESHES)
def test_a_seed_gives_the_same_parameters_bit_for_bit_on_every_mesh(mesh_name):
    jax.tree.map(np.testing.assert_array_equal, step_on(mesh_name)[0], step_on("dp8")[0])


def test_a_seed_gives_the_same_parameters_to_an_ulp_without_a_mesh():
    to_an_ulp = functools.partial(np.testing.assert_array_max_ulp, maxulp=1)
    jax.tree.map(to_an_ulp, step_on("dp8")[0], named(step_without_mesh()[0]))


@pytest.mark.parametrize("mesh_name", MESHES)
def test_gradients_are_the_same_on_every_mesh(mesh_name):
    assert_close_by_norm(step_on(mesh_name)[1], step_without_mesh()[1], relative=1e-5)


def test_prefill_and_decoding_on_a_mesh_equal_one_pass_without():
    inputs, _ = tokens(MODEL.config.vocab_size)

    def device_program(key, inputs):
        params = init(MODEL, key)
        run = functools.partial(MODEL.apply, {"params": params}, return_state=True)
        first, state = run(inputs[:, :7])

        def decode(state, token):
            logits, state = run(token[:, None], state=state)
            return state, logits[:, 0]

        _, rest = lax.scan(decode, state, inputs[:, 7:].T)
        return jnp.concatenate([first, rest.swapaxes(0, 1)], axis=1)

    mesh = make_mesh(dp=2, fsdp=2, tp=2)
    logits = on_mesh(device_program, mesh, (P(), BATCH), BATCH)(jax.random.key(KEY), inputs)
    assert_close(logits, jax.jit(MODEL.apply)({"params": step_without_mesh()[0]}, inputs))
