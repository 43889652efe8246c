"""No compiled kernel multiplies with a scalar that is broadcast inside a YNNPACK fusion, which gives garbage."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from xlstm_jax.kernels.mlstm import empty_state, mlstm, mlstm_step
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec
from xlstm_jax.kernels.slstm import empty_state as empty_slstm_state
from xlstm_jax.kernels.slstm import slstm

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = \S+ (?P<op>[\w-]+)\((?P<operands>[^)]*)\)(?P<rest>.*)")


def products_with_broadcast_scalars(function, *arguments):
    """Compile a function, and list the products of its YNNPACK fusions that have such an operand."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    found = []
    for fusion in re.findall(r"calls=%(\S+),.*__ynn_fusion", text):
        body = re.search(rf"^%{re.escape(fusion)} \(.*?^}}", text, re.MULTILINE | re.DOTALL)
        assert body is not None
        instructions = {m["name"]: m for m in map(INSTRUCTION.match, body[0].splitlines()) if m}

        def operands(instruction):
            return re.findall(r"%(\S+?)(?:,|$)", instruction["operands"])

        def is_scalar(name, instructions=instructions):
            instruction = instructions[name]
            if instruction["op"] == "broadcast":
                return "dimensions={}" in instruction["rest"]
            return bool(sources := operands(instruction)) and all(map(is_scalar, sources))

        products = (i for i in instructions.values() if i["op"] == "dot")
        found += [i["name"] for i in products if any(map(is_scalar, operands(i)))]
    return found


def test_such_a_product_is_found(key):
    q, x = jax.random.normal(key, (8, 4, 256, 32)), jax.random.normal(key, (8, 4, 256))
    broadcast = functools.partial(jnp.broadcast_to, shape=(8, 4, 32, 64))
    assert products_with_broadcast_scalars(lambda q, x: q @ broadcast(jnp.max(x)), q, x)


@pytest.mark.parametrize("length", [256, 512])
@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_no_form_of_the_mlstm_multiplies_with_an_empty_memory(form, length, key):
    arguments = ArgSpec(4, length, 4, 32, 64).arguments(key)
    run = functools.partial(mlstm, chunk_size=256, backend=form, return_state=True)

    def loss(*arguments):
        hidden, last = run(*arguments)
        return jnp.sum(jnp.sin(hidden)) + jnp.sum(last.memory)

    assert not products_with_broadcast_scalars(run, *arguments)
    assert not products_with_broadcast_scalars(jax.grad(loss, argnums=(0, 1, 2, 3, 4)), *arguments)


def test_no_first_step_multiplies_with_an_empty_memory(key):
    arguments = [x[:, 0] for x in ArgSpec(4, 1, 4, 256, 256).arguments(key)]
    gates, recurrent = jax.random.normal(key, (64, 1, 4, 4, 128)), jax.random.normal(key, (4, 128, 4, 128))
    assert not products_with_broadcast_scalars(lambda *x: mlstm_step(*x, empty_state(4, 4, 256, 256)), *arguments)
    assert not products_with_broadcast_scalars(slstm, gates, recurrent)
    state = functools.partial(empty_slstm_state, 64, 4, 128)
    assert not products_with_broadcast_scalars(lambda *x: slstm(*x, state=state()), gates, recurrent)
