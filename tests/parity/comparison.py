"""What all comparisons with live models share."""

import jax
import jax.numpy as jnp
import numpy as np
from conversion.loading import shapes_of, state_dict_of
from golden import peers
from tolerances import assert_close_by_norm

RELATIVE = 1e-4


def arrays_of(tensors):
    """Copy named tensors into NumPy."""
    return {name: np.array(tensor.detach().numpy()) for name, tensor in tensors.items()}


def assert_same(actual, expected):
    """Assert that named arrays are those of named tensors.

    Some gradients are but what is left when larger ones cancel, as those of all that scales the input of a norm; in
    float32 both sides are off by some 1e-7 of the larger ones. So what is below a hundredth of all arrays together is
    measured beside that hundredth.
    """
    expected = arrays_of(expected)
    total = np.sqrt(sum(np.sum(np.square(array, dtype=np.float64)) for array in expected.values()))
    assert_close_by_norm(actual, expected, relative=RELATIVE, at_least=1e-2 * total)


def assert_logits_and_gradients_are_those_of(theirs, ours, run, tokens):
    """Compare one pass over tokens with the same parameters, and the gradients of all of them.

    Args:
        theirs: The model in torch.
        ours: The `Converted` model.
        run: Returns the logits of their model.
        tokens: The tokens.
    """
    parameters = peers.parameters_of(theirs)
    expected = run(tokens)
    projection = peers.grid(np.random.default_rng(7), tuple(expected.shape), 1.0)
    arrays, tokens = arrays_of(parameters), jnp.asarray(tokens.numpy())
    assert_same({"logits": ours.logits(arrays, tokens)}, {"logits": expected})
    gradients, _ = ours.gradients(arrays, None, tokens, projection.numpy())
    assert_same(gradients, peers.gradients(expected, projection, parameters))


def assert_our_parameters_work_in(theirs, ours, run, tokens, *, missing=()):
    """Draw parameters of our model, load them into theirs, and compare one pass over tokens.

    Args:
        theirs: The model in torch; its parameters are overwritten.
        ours: The `Converted` model.
        run: Returns the logits of their model.
        tokens: The tokens.
        missing: What our state dict may leave out.
    """
    draw = np.random.default_rng(11)
    params = jax.tree.map(lambda x: jnp.asarray(0.3 * draw.standard_normal(x.shape, np.float32)), shapes_of(ours.model))
    state_dict = state_dict_of(ours.model, ours.rules, params)
    tensors = {name: peers.torch.tensor(np.asarray(value)) for name, value in state_dict.items()}
    loaded = theirs.load_state_dict(tensors, strict=False)
    assert loaded.missing_keys == list(missing)
    assert not loaded.unexpected_keys
    logits = ours.logits(state_dict, jnp.asarray(tokens.numpy()))
    with peers.torch.no_grad():
        assert_same({"logits": logits}, {"logits": run(tokens)})
