"""The sLSTM for callers: initial and final state, document resets, masked positions, the best form for the device."""

import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.log import say_once
from xlstm_jax.kernels.slstm import reference
from xlstm_jax.kernels.slstm.recompute import slstm_recompute
from xlstm_jax.kernels.slstm.state import SLSTMState, empty_state

LOGGER = logging.getLogger(__name__)

Form = Literal["reference", "recompute"]
Backend = Literal["auto", "reference", "recompute"]


def slstm(
    gates: Float[Array, "b s 4 h d"],
    recurrent: Float[Array, "h d 4 d"],
    *,
    state: SLSTMState | None = None,
    return_state: bool = False,
    resets: Bool[Array, "b s"] | None = None,
    mask: Bool[Array, "b s"] | None = None,
    backend: Backend = "auto",
) -> Float[Array, "b s h d"] | tuple[Float[Array, "b s h d"], SLSTMState]:
    """Run sequences through an sLSTM cell.

    Args:
        gates: What the inputs contribute to the gates i, f, z, o, biases included.
        recurrent: The kernel from the hidden state to the gates, head by head: `[head, from, gate, to]`.
        state: The memory before the first position; empty by default.
        return_state: Whether to return the memory after the last position too.
        resets: Where a document begins: the memory is emptied before that position.
        mask: Which positions count. The others may hold anything: they leave the memory as it is, and give zeros.
        backend: The form of the computation; `auto` picks the fastest for this device.

    Returns:
        The hidden states, and the last state if asked for.
    """
    _check(gates, recurrent, state, resets, mask)
    dtype = jnp.promote_types(gates.dtype, jnp.float32)
    b, _, _, h, d = gates.shape
    first = empty_state(b, h, d, dtype) if state is None else SLSTMState(*(x.astype(dtype) for x in state))
    run = _form(backend)
    inputs = gates.astype(dtype)
    if mask is not None:
        inputs = jnp.where(mask[..., None, None, None], inputs, 0.0)
    result: Any = run(inputs, recurrent, first, resets, mask)
    hidden, last = result
    if mask is not None:
        hidden = jnp.where(mask[..., None, None], hidden, 0.0)
    hidden = hidden.astype(gates.dtype)
    return (hidden, last) if return_state else hidden


def slstm_step(
    gates: Float[Array, "b 4 h d"], recurrent: Float[Array, "h d 4 d"], state: SLSTMState
) -> tuple[Float[Array, "b h d"], SLSTMState]:
    """Run one token through an sLSTM cell: the arguments and results of `slstm` without the sequence axis."""
    state = reference.step(state, gates.astype(state.cell.dtype), recurrent)
    return state.hidden.astype(gates.dtype), state


def choose_backend() -> tuple[Form, str]:
    """Return the form that `auto` picks on this device, and what is to be said about it."""
    return "recompute", "the scan with a backward pass that keeps only hidden states, on every device"


def resolve_backend(backend: Backend) -> Form:
    """Return the form that computes on this device, and say what `auto` picks; a `ValueError` says why none can."""
    if backend == "auto":
        form, reason = choose_backend()
        say_once(LOGGER, f"sLSTM: {reason}.")
        return form
    if backend not in get_args(Form):
        raise ValueError(f"There is no sLSTM backend {backend!r}, only {', '.join(get_args(Backend))}.")
    return backend


def _form(backend: Backend) -> Callable[..., Any]:
    return reference.slstm_reference if resolve_backend(backend) == "reference" else slstm_recompute


def _check(gates, recurrent, state, resets, mask):
    if gates.ndim != 5 or gates.shape[2] != 4:
        raise ValueError(f"gates has shape {gates.shape}, but must be [batch, positions, 4 gates, heads, head_dim].")
    b, s, _, h, d = gates.shape
    if s == 0:
        raise ValueError("The sequence has no positions; pass at least one.")
    expected = {"recurrent": (recurrent.shape, (h, d, 4, d))}
    if state is not None:
        expected |= {f"state.{name}": (x.shape, (b, h, d)) for name, x in state._asdict().items()}
    rows = {"resets": resets, "mask": mask}
    expected |= {name: (x.shape, (b, s)) for name, x in rows.items() if x is not None}
    for name, (shape, needed) in expected.items():
        if shape != needed:
            raise ValueError(f"{name} has shape {shape}, but gates of shape {gates.shape} need {needed}.")
