"""Our sLSTM on the arrays of the cell of the package `xlstm`."""

import jax
import jax.numpy as jnp

from xlstm_jax.kernels.slstm import SLSTMState, slstm


def outputs_and_gradients(arrays, initial_state, projection, *, num_heads, backend):
    """Return outputs, last state, and the gradients of projected outputs, all in the layouts of the public cell.

    Gates and biases are ordered by gate and head, the kernel by head, gate, out, in; a state is four arrays in one.
    """

    def loss(arrays, initial_state):
        gates = arrays["input"] + arrays["_bias_"]
        gates = gates.reshape(*gates.shape[:2], 4, num_heads, -1)
        kernel = arrays["_recurrent_kernel_"]
        recurrent = kernel.reshape(num_heads, 4, -1, kernel.shape[-1]).transpose(0, 3, 1, 2)
        state = SLSTMState(*(x.reshape(x.shape[0], num_heads, -1) for x in initial_state))
        hidden, last = slstm(gates, recurrent, state=state, return_state=True, backend=backend)
        outputs = jnp.moveaxis(hidden, 1, 2)
        last = jnp.stack([x.reshape(x.shape[0], -1) for x in last])
        return jnp.sum(outputs * projection), (outputs, last)

    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (gradients, initial_gradient), (outputs, last) = gradient(arrays, jnp.asarray(initial_state))
    # The stabiliser is a choice of units and carries no gradient.
    return outputs, last, gradients | {"initial_state": initial_gradient[:3]}
