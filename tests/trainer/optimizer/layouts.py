"""A small tree of parameters, ways to split it over eight devices, and a run of an optimizer over it."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import traverse_util
from jax.sharding import PartitionSpec
from meshes import make_mesh

from xlstm_jax.utils.partitioned import is_partitioned, reboxed, unboxed, with_names

NUM_BLOCKS = 2
NUM_STEPS = 3
SHAPES = {
    "token_embedding.embedding": (16, 8),
    "block_stack.block.up.kernel": (NUM_BLOCKS, 8, 24),
    "block_stack.block.up.bias": (NUM_BLOCKS, 24),
    "block_stack.block.down.kernel": (NUM_BLOCKS, 16, 8),
    "block_stack.block.skip": (NUM_BLOCKS,),
    "projection.kernel": (8, 16),
    "temperature": (),
}

COMPILER_OPTIONS = {"xla_backend_optimization_level": 1}
"""Each of these programs runs once: most of the time goes into compiling it."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and what each parameter is split over on it."""

    mesh: Mapping[str, int]
    names: Mapping[str, tuple]


LAYOUTS = {
    "fsdp8": Layout(
        {"fsdp": 8},
        {
            "token_embedding.embedding": ("fsdp", None),
            "block_stack.block.up.kernel": (None, None, "fsdp"),
            "block_stack.block.up.bias": (None, "fsdp"),
            "block_stack.block.down.kernel": (None, "fsdp", None),
            "projection.kernel": ("fsdp", None),
        },
    ),
    "tp4": Layout(
        {"dp": 2, "tp": 4},
        {
            "token_embedding.embedding": (None, "tp"),
            "block_stack.block.up.kernel": (None, None, "tp"),
            "block_stack.block.up.bias": (None, "tp"),
            "block_stack.block.down.kernel": (None, "tp", None),
            "projection.kernel": (None, "tp"),
        },
    ),
    "two_axes": Layout(
        {"fsdp": 2, "pp": 2, "tp": 2},
        {
            "token_embedding.embedding": (("fsdp", "tp"), None),
            "block_stack.block.up.kernel": ("pp", "fsdp", "tp"),
            "block_stack.block.up.bias": ("pp", "tp"),
            "block_stack.block.down.kernel": ("pp", None, ("tp", "fsdp")),
            "block_stack.block.skip": ("pp",),
            "projection.kernel": ("tp", "fsdp"),
        },
    ),
}


def nested(flat: Mapping[str, object]) -> dict:
    return traverse_util.unflatten_dict(dict(flat), sep=".")


def flat(tree: dict) -> dict:
    return traverse_util.flatten_dict(tree, sep=".")


def random_tree(seed: int, leading: tuple[int, ...] = ()) -> dict:
    """Draw a tree of the shapes above; the leaves differ in size, so that their norms do."""
    generator = np.random.default_rng(seed)
    return nested(
        {
            name: jnp.asarray((index + 1) * generator.normal(size=leading + shape), jnp.float32)
            for index, (name, shape) in enumerate(SHAPES.items())
        }
    )


def params_and_gradients() -> tuple[dict, dict]:
    """Return parameters, about as large as updates are, and the gradients of `NUM_STEPS` steps, stacked."""
    return optax.tree.scale(0.1, random_tree(1)), random_tree(2, (NUM_STEPS,))


def boxed(params: dict, layout: Layout) -> dict:
    """Box the parameters that a layout splits."""
    return nested({name: with_names(x, layout.names.get(name, ())) for name, x in flat(params).items()})


def run_steps(optimizer: optax.GradientTransformation, params, gradients):
    """Take one step for each gradient; return all updates, unboxed and stacked."""

    def step(carry, gradient):
        params, state = carry
        gradient = jax.tree.map(reboxed, params, gradient, is_leaf=is_partitioned)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), jax.tree.map(unboxed, updates, is_leaf=is_partitioned)

    return jax.lax.scan(step, (params, optimizer.init(params)), gradients)[1]


def run_on_one_device(optimizer: optax.GradientTransformation, params=None, gradients=None):
    """Return the updates of some steps without a mesh."""
    if params is None:
        params, gradients = params_and_gradients()
    return jax.jit(functools.partial(run_steps, optimizer), compiler_options=COMPILER_OPTIONS)(params, gradients)


def run_on_mesh(optimizer: optax.GradientTransformation, layout: Layout):
    """Return the updates of some steps on the mesh of a layout, each device with its part of the parameters."""
    params, gradients = params_and_gradients()
    params = boxed(params, layout)
    specs = nn.get_partition_spec(params)
    step_specs = jax.tree.map(
        lambda spec: PartitionSpec(None, *spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    run = jax.shard_map(
        functools.partial(run_steps, optimizer),
        mesh=make_mesh(**layout.mesh),
        in_specs=(specs, step_specs),
        out_specs=step_specs,
        check_vma=False,
    )
    return jax.jit(run, compiler_options=COMPILER_OPTIONS)(params, gradients)
