"""Our models with the parameters of others: what they compute, under the names of the others."""

import functools

import jax
import jax.numpy as jnp

from xlstm_jax.conversion.rules import to_ours, to_theirs
from xlstm_jax.models.shared.layout import from_canonical, to_canonical


def params_of(model, rules, state_dict):
    """Lay out a foreign state dict as the variables of our model."""
    return {"params": from_canonical(to_ours(state_dict, rules), model.config.kinds, model.config.scan_blocks)}


def state_dict_of(model, rules, params):
    """Write the parameters of our model as a foreign state dict; the inverse of `params_of`."""
    return to_theirs(to_canonical(params, model.config.kinds, model.config.scan_blocks), rules)


def shapes_of(model):
    """Return the shapes of the parameters that our model makes."""
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]


class Converted:
    """A model of ours that takes a foreign state dict.

    Attributes:
        model: The model.
        rules: The rules for the state dict.
    """

    def __init__(self, model, rules):
        self.model, self.rules = model, rules
        self.logits = jax.jit(self._logits)
        self.logits_and_state = jax.jit(functools.partial(self._logits, return_state=True))
        self.gradients = jax.jit(jax.grad(self._projected, argnums=(0, 1), allow_int=True))

    def _logits(self, state_dict, tokens, state=None, return_state=False):
        variables = params_of(self.model, self.rules, state_dict)
        return self.model.apply(variables, tokens, state=state, return_state=return_state)

    def _projected(self, state_dict, state, tokens, projection):
        return jnp.sum(self._logits(state_dict, tokens, state) * projection)
