"""Dense layers that are split over the model axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from xlstm_jax.distributed.dense import ColumnDense, apply_to_same

FEATURES = {"a": 3, "b": 8, "c": 5}


class Layers(nn.Module):
    """Some layers that see the same features, applied together or one by one."""

    together: bool
    use_bias: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x):
        bias_init = nn.initializers.normal(1.0)
        common = {"axis_name": "tp", "use_bias": self.use_bias, "bias_init": bias_init, "dtype": jnp.dtype(self.dtype)}
        layers = [ColumnDense(n, name=name, **common) for name, n in FEATURES.items()]
        return apply_to_same(x, layers) if self.together else [layer(x) for layer in layers]


def drawn(model, dtype="float32"):
    """Draw features, parameters and gradients of outputs."""
    x = jax.random.normal(jax.random.key(0), (2, 7, 6), dtype)
    keys = jax.random.split(jax.random.key(1), len(FEATURES))
    gradients = [jax.random.normal(k, (2, 7, n), dtype) for k, n in zip(keys, FEATURES.values(), strict=True)]
    return model.init(jax.random.key(2), x), x, gradients


def results(model, params, x, gradients):
    outputs, backward = jax.vjp(model.apply, params, x)
    return outputs, backward(gradients)


@pytest.mark.parametrize("use_bias", [False, True])
def test_layers_that_share_an_input_compute_what_each_does_alone(use_bias):
    params, x, gradients = drawn(Layers(together=True, use_bias=use_bias))
    together, alone = (results(Layers(t, use_bias), params, x, gradients) for t in (True, False))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), together, alone)


def test_the_gradient_of_a_shared_input_is_one_product():
    model = Layers(together=True)
    jaxpr = str(jax.make_jaxpr(lambda *inputs: results(model, *inputs)[1])(*drawn(model)))
    assert jaxpr.count("dot_general") == len(FEATURES) + 2  # all outputs, then those of inputs and of kernels


def test_gradients_of_kernels_keep_the_precision_of_kernels():
    model = Layers(together=True, dtype="bfloat16")
    params, x, gradients = drawn(model, "bfloat16")
    _, (dparams, _) = results(model, params, x, gradients)
    for name, gradient in zip(FEATURES, gradients, strict=True):
        exact = np.einsum("bsi,bso->io", *(np.asarray(y, np.float64) for y in (x, gradient)))
        np.testing.assert_allclose(dparams["params"][name]["kernel"], exact, rtol=1e-5, atol=1e-5)
