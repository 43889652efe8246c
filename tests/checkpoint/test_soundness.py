"""States with NaN are recognised wherever they lie."""

import jax.numpy as jnp
import pytest
from checkpoint.states import make_state

from xlstm_jax.checkpoint.soundness import is_sound


def test_a_state_on_a_mesh_is_sound_until_one_number_of_it_is_not():
    state = make_state(dp=2, fsdp=2, tp=2)
    assert is_sound(state.params, state.opt_state)
    embedding = state.params["token_embedding"]["embedding"]
    broken = embedding.replace(value=embedding.value.at[3, 5].set(jnp.nan))
    assert not is_sound({**state.params, "token_embedding": {"embedding": broken}}, state.opt_state)
    assert not is_sound({}, state.opt_state[1][0]._replace(nu=broken))


@pytest.mark.parametrize(
    ("params", "opt_state", "expected"),
    [([0.0], [jnp.inf], True), ([jnp.inf], [0.0], False), ([0.0], [jnp.nan], False)],
)
def test_an_optimizer_may_hold_infinity_but_not_nan(params, opt_state, expected):
    count = jnp.int32(3)
    assert bool(is_sound(jnp.array(params), (count, jnp.array(opt_state)))) == expected


def test_what_holds_no_floats_is_sound():
    assert is_sound({"count": jnp.arange(3)}, None)
