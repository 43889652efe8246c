"""Small Llama models with parameters that all matter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer

SMALL = {
    "vocab_size": 24,
    "embedding_dim": 24,
    "num_blocks": 2,
    "head_dim": 6,
    "num_kv_heads": 2,
    "ffn_dim": 20,
    "max_state_length": 16,
}


@functools.cache
def build(**changes):
    """Return a small model, and parameters for it that all matter."""
    model = LlamaTransformer(LlamaConfig(**(SMALL | changes)))
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"])
    generator = np.random.default_rng(0)

    def draw(path, leaf):
        centre, scale = (1.0, 0.3) if path[-1].key == "scale" else (0.0, leaf.shape[-2:][0] ** -0.5)
        return jnp.asarray(centre + scale * generator.normal(size=leaf.shape), leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


COMPILED = {}
"""Models and their programs, by the identity of the model and what else is fixed in a program."""


def compiled(model, make_program, *fixed):
    """Return the program of a model, compiled once for all tests."""
    key = (id(model), make_program, fixed)
    if key not in COMPILED:
        COMPILED[key] = model, jax.jit(make_program(model, *fixed))
    return COMPILED[key][1]


def apply(model, params, *args, train=False, return_state=False, **kwargs):
    """Run a model."""
    return compiled(model, _forward, train, return_state)(params, args, kwargs)


def _forward(model, train, return_state):
    def forward(params, args, kwargs):
        rngs = {"dropout": kwargs.pop("key")} if train else {}
        return model.apply({"params": params}, *args, train=train, return_state=return_state, rngs=rngs, **kwargs)

    return forward


def gradients(model, params):
    """Return the gradients of the mean loss of some targets, by the names of parameters."""
    return named(compiled(model, _gradient)(params))


def _gradient(model):
    tokens, targets = draw_tokens(), draw_tokens(seed=1)
    return jax.grad(lambda params: jnp.mean(model.apply({"params": params}, tokens, targets=targets)[0]))


def named(tree):
    """Return the leaves of a tree by their paths."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def draw_tokens(batch=2, length=11, vocab_size=SMALL["vocab_size"], seed=0):
    """Draw tokens."""
    generator = np.random.default_rng(seed)
    return jnp.asarray(generator.integers(0, vocab_size, (batch, length)), jnp.int32)


def unrolled(params, num_blocks):
    """Write the parameters of scanned blocks as those of unrolled ones."""
    blocks = params["block_stack"]["block"]
    each = {f"block_{i}": jax.tree.map(lambda x, i=i: x[i], blocks) for i in range(num_blocks)}
    return {**params, "block_stack": each}
