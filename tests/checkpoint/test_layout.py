"""What is stored depends neither on the mesh nor on how blocks are run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint.states import (
    CONFIG,
    MIXED,
    MIXED_UNROLLED,
    UNROLLED,
    assert_laid_out_alike,
    assert_same,
    host,
    make_state,
)

from xlstm_jax.checkpoint.layout import Stack, canonical_targets, describe, find_stacks, from_canonical, to_canonical
from xlstm_jax.models.shared import layout as model_layout


def round_trip(tree, like, stacks_of_tree, stacks_of_like):
    """Store a tree and read it into the place of another."""
    targets = describe(like)
    shardings = jax.tree.map(lambda target: target.sharding, canonical_targets(targets, stacks_of_like))
    stored = jax.device_put(host(to_canonical(tree, stacks_of_tree)), shardings)
    return from_canonical(stored, targets, stacks_of_like)


@pytest.mark.parametrize("config", [CONFIG, MIXED], ids=["one kind", "two kinds"])
def test_each_block_is_stored_under_its_own_name(config):
    state = make_state(config=config, fsdp=8)
    stored = to_canonical(state.params, find_stacks(state.params))
    expected = model_layout.to_canonical(host(state.params), config.kinds, scan=True)
    assert set(stored["block_stack"]) == {f"block_{i}" for i in range(config.num_blocks)}
    assert_same(stored, expected)


@pytest.mark.parametrize(
    ("scanned", "unrolled"), [(CONFIG, UNROLLED), (MIXED, MIXED_UNROLLED)], ids=["one kind", "two kinds"]
)
def test_scanned_blocks_can_be_read_as_unrolled_ones_and_back(scanned, unrolled):
    state, other = make_state(config=scanned, dp=2, fsdp=2, tp=2), make_state(1, unrolled, fsdp=8)
    stacks = find_stacks(state.params)
    for name in ("params", "opt_state"):
        tree, like = getattr(state, name), getattr(other, name)
        result = round_trip(tree, like, stacks, {})
        assert_laid_out_alike(result, like)
        assert_same(round_trip(result, tree, {}, stacks), tree)
    mu = model_layout.to_canonical(host(state.opt_state[1][0].mu), scanned.kinds, scan=True)
    assert_same(round_trip(state.opt_state, other.opt_state, stacks, {})[1][0].mu, mu)


def test_names_of_optimizer_states_are_their_fields_and_places():
    params = {"kernel": jnp.ones(3)}
    stored = to_canonical(optax.chain(optax.clip(1.0), optax.adam(0.1)).init(params), {})
    assert set(stored["1"]["0"]) == {"count", "mu", "nu"}
    assert "0" not in stored
    assert set(stored["1"]["0"]["mu"]) == {"kernel"}


def test_a_part_of_the_blocks_keeps_its_places():
    params = make_state(config=MIXED).params
    only_second = {"block_stack": {"block": {"1": params["block_stack"]["block"]["1"]}}}
    stored = to_canonical(only_second, find_stacks(params))
    assert set(stored["block_stack"]) == {"block_1", "block_3"}


def test_what_has_no_row_for_each_block_is_stored_whole():
    stacks = {("block_stack", "block"): Stack(1, 2)}
    tree = {"row": {"block_stack": {"block": {"kernel": np.arange(3)}}}, "count": np.int32(3)}
    stored = to_canonical(tree, stacks)
    np.testing.assert_array_equal(stored["row"]["block_stack"]["block"]["kernel"], np.arange(3))


def test_modules_that_are_not_ours_have_no_stacks():
    assert find_stacks({"layers": {"block": {"kernel": np.ones((2, 3))}}, "block_stack": {"block": np.ones(2)}}) == {}
    unlike = {"block_stack": {"block": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}}}
    assert find_stacks(unlike) == {}


def test_a_copy_of_blocks_takes_memory_only_once():
    state = make_state(dp=2, fsdp=4)
    stored = to_canonical(state.params, find_stacks(state.params))
    kernel = stored["block_stack"]["block_0"]["ffn"]["up"]["kernel"]
    assert sum(shard.data.size for shard in kernel.addressable_shards) == kernel.size
    assert kernel.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "old style"])
def test_random_keys_come_back_as_they_were(kind):
    key = jax.random.PRNGKey(3) if kind == "old style" else jax.random.key(3, impl=kind)
    result = round_trip({"rng": key}, {"rng": key}, {}, {})
    assert result["rng"].dtype == key.dtype
    np.testing.assert_array_equal(jax.random.normal(result["rng"], (4,)), jax.random.normal(key, (4,)))


def test_python_numbers_come_back_as_they_were():
    tree = {"step": 3, "rate": 0.5, "rows": np.arange(3, dtype=np.int8)}
    result = from_canonical(to_canonical(tree, {}), describe(tree), {})
    assert (type(result["step"]), result["step"], result["rate"]) == (int, 3, 0.5)
    assert result["rows"].dtype == np.int8


def test_a_single_array_is_a_tree():
    array = jnp.arange(3)
    assert_same(from_canonical(to_canonical(array, {}), describe(array), {}), array)
