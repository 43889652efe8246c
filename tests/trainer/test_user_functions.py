"""Steps call loss functions of the documented signatures, with the context of the step."""

import jax
import jax.numpy as jnp
import pytest

from xlstm_jax.dataset.batch import Batch
from xlstm_jax.trainer.user_functions import StepContext, current_context, documented_loss

CONTEXT = StepContext(train=False, mutable_variables={"statistics": 1}, num_parts=2)
ARGUMENTS = None, len, Batch(inputs=jnp.zeros(2), targets=jnp.zeros(2)), jax.random.key(0)


def without_variables(params, apply_fn, batch, rng, train=True):
    return train


def with_variables(params, apply_fn, batch, rng, train=True, mutable_variables=None):
    return train, mutable_variables


def with_any(params, apply_fn, batch, rng, **options):
    return options["train"], options["mutable_variables"]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (without_variables, False),
        (with_variables, (False, {"statistics": 1})),
        (with_any, (False, {"statistics": 1})),
    ],
)
def test_a_loss_function_gets_the_arguments_that_it_has(loss, expected):
    assert documented_loss(loss)(*ARGUMENTS, CONTEXT) == expected


def test_the_context_is_known_while_a_loss_function_runs():
    def loss(params, apply_fn, batch, rng, train=True):
        return current_context()

    assert documented_loss(loss)(*ARGUMENTS, CONTEXT) is CONTEXT
    assert current_context() is None


def test_a_loss_function_that_fails_leaves_no_context():
    def loss(params, apply_fn, batch, rng, train=True):
        raise RuntimeError("diverged")

    with pytest.raises(RuntimeError, match="diverged"):
        documented_loss(loss)(*ARGUMENTS, CONTEXT)
    assert current_context() is None
