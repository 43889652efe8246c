"""How the next token is chosen: from which tokens, and how often."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xlstm_jax.inference.sampling import filtered_sampling, greedy_sampling, temperature_sampling

LOGITS = jnp.log(jnp.array([0.05, 0.4, 0.25, 0.3]))


def drawn(key, **options) -> set[int]:
    tokens = jax.vmap(lambda k: filtered_sampling(LOGITS, k, **options))(jax.random.split(key, 2000))
    return set(np.asarray(tokens).tolist())


def test_only_the_k_likeliest_tokens_are_drawn(key):
    assert drawn(key, top_k=2) == {1, 3}
    assert drawn(key, top_k=1) == {1}
    assert drawn(key, top_k=9) == {0, 1, 2, 3}


def test_only_the_fewest_tokens_with_a_probability_are_drawn(key):
    assert drawn(key, top_p=0.3) == {1}
    assert drawn(key, top_p=0.5) == {1, 3}
    assert drawn(key, top_p=0.75) == {1, 2, 3}
    assert drawn(key, top_p=1.0) == {0, 1, 2, 3}


def test_the_stricter_of_two_limits_holds(key):
    assert drawn(key, top_k=3, top_p=0.5) == {1, 3}
    assert drawn(key, top_k=1, top_p=0.9) == {1}


def test_a_temperature_changes_which_tokens_have_a_probability(key):
    assert drawn(key, top_p=0.75, temperature=0.3) == {1, 3}


def test_without_limits_it_is_temperature_sampling(key):
    expected = temperature_sampling(LOGITS, key, 0.7)
    assert filtered_sampling(LOGITS, key, temperature=0.7) == expected


def test_rows_are_limited_by_themselves(key):
    logits = jnp.stack([LOGITS, LOGITS[::-1]])
    assert filtered_sampling(logits, key, top_k=1).tolist() == greedy_sampling(logits).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": math.nan}, "temperature is nan.*at least 0"),
        ({"top_k": 1.5}, r"top_k is 1\.5, but must be a whole number"),
        ({"temperature": -1.0}, "temperature is -1.0"),
    ],
)
def test_a_limit_that_leaves_nothing_or_makes_no_sense_is_refused(key, options, message, unchecked_shapes):
    with pytest.raises(ValueError, match=message):
        filtered_sampling(LOGITS, key, **options)
