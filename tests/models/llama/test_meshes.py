"""A Llama decodes on a mesh as it does without; what else holds on every mesh is in `models/test_meshes.py`."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from meshes import BATCH, make_mesh, on_mesh
from models.runs import PARALLEL, init, tokens
from tolerances import assert_close

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

    mesh, key = make_mesh(dp=2, fsdp=2, tp=2), jax.random.key(3)
    logits = on_mesh(device_program, mesh, (P(), BATCH), BATCH)(key, inputs)
    assert_close(logits, jax.jit(lambda key: MODEL.apply({"params": init(MODEL, key)}, inputs))(key))
