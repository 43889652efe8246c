"""Public functions for the sLSTM: states, document resets, masked positions, and selection of the fastest form."""

import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.shared.log_once import log_once
from xlstm_jax.kernels.shared.padding import pad_to
from xlstm_jax.kernels.slstm import reference
from xlstm_jax.kernels.slstm.hopper.limits import HEAD_DIMS, ROWS, kernel_dim, mosaic_problem
from xlstm_jax.kernels.slstm.recompute import slstm_recompute
from xlstm_jax.kernels.slstm.state import SLSTMState, empty_state

LOGGER = logging.getLogger(__name__)

Form = Literal["reference", "recompute", "mosaic"]
Backend = Literal["auto", "reference", "recompute", "mosaic"]


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
        gates: The contribution of the inputs to the pre-activations of the gates i, f, z, o, biases included.
        recurrent: The kernel from the hidden state to the gates, for each head: `[head, from, gate, to]`.
        state: The memory before the first position; empty by default.
        return_state: Whether to also return the memory after the last position.
        resets: The positions at which documents start: the memory is emptied before them.
        mask: The valid positions. Others may have any values: they do not change the memory, and their outputs are 0.
        backend: The form of the computation; `auto` selects the fastest for this device: on Hopper GPUs, with a
            bfloat16 recurrent kernel and heads of 32 to 192 units, the kernel `mosaic`, otherwise `recompute`.

    Returns:
        The hidden states, and the last state if requested.
    """
    _check(gates, recurrent, state, resets, mask)
    dtype = jnp.promote_types(gates.dtype, jnp.float32)
    b, s, _, h, d = gates.shape
    first = empty_state(b, h, d, dtype) if state is None else SLSTMState(*(x.astype(dtype) for x in state))
    form = resolve_backend(backend, d, recurrent.dtype, dtype, (b + -b % ROWS) * s * h * kernel_dim(d))
    # The kernel for GPUs reads gates in their own precision, as they are most of its memory traffic.
    inputs = gates if form == "mosaic" and gates.dtype == jnp.bfloat16 else gates.astype(dtype)
    if mask is not None:
        inputs = jnp.where(mask[..., None, None, None], inputs, 0.0)
    result: Any = _implementation(form)(inputs, recurrent, first, resets, mask)
    hidden, last = result
    if mask is not None:
        hidden = jnp.where(mask[..., None, None], hidden, 0.0)
    hidden = hidden.astype(gates.dtype)
    return (hidden, last) if return_state else hidden


def slstm_step(
    gates: Float[Array, "b 4 h d"], recurrent: Float[Array, "h d 4 d"], state: SLSTMState
) -> tuple[Float[Array, "b h d"], SLSTMState]:
    """Run one token through an sLSTM cell: the arguments and results of `slstm` without the sequence axis."""
    if gates.ndim != 4 or gates.shape[1] != 4:
        raise ValueError(f"gates has shape {gates.shape}, but must be [batch, 4 gates, heads, head_dim] for one token.")
    _check_shapes(gates, recurrent, state, {})
    state = reference.step(state, gates.astype(state.cell.dtype), recurrent)
    return state.hidden.astype(gates.dtype), state


def choose_backend(
    head_dim: int = HEAD_DIMS[0],
    recurrent_dtype: DTypeLike = jnp.bfloat16,
    state_dtype: DTypeLike = jnp.float32,
    num_cells: int = 0,
) -> tuple[Form, str]:
    """Return the form that `auto` selects on this device, and the reason to log.

    Args:
        head_dim: The number of units of a head.
        recurrent_dtype: Precision of the recurrent kernel.
        state_dtype: Precision of the memory.
        num_cells: The number of units of all heads, padded as in the kernel, times positions and sequences, padded to a
            multiple of `ROWS` sequences.
    """
    if problem := mosaic_problem(head_dim, recurrent_dtype, state_dtype, num_cells):
        return "recompute", f"a scan that keeps only hidden states, as {problem}"
    reason = "one launch for the whole sequence, with the recurrent kernel on chip, for this is a Hopper GPU"
    if kernel_dim(head_dim) != head_dim:
        reason += f"; heads of {head_dim} units are filled up to {kernel_dim(head_dim)}"
    return "mosaic", reason


def resolve_backend(
    backend: Backend,
    head_dim: int = HEAD_DIMS[0],
    recurrent_dtype: DTypeLike = jnp.bfloat16,
    state_dtype: DTypeLike = jnp.float32,
    num_cells: int = 0,
) -> Form:
    """Return the form to use on this device, and log the choice of `auto`.

    The arguments are those of `choose_backend`.

    Raises:
        ValueError: If the form is not supported; the message has the reason.
    """
    if backend == "auto":
        form, reason = choose_backend(head_dim, recurrent_dtype, state_dtype, num_cells)
        log_once(LOGGER, f"sLSTM: {reason}.")
        return form
    if backend not in get_args(Form):
        raise ValueError(f"There is no sLSTM backend {backend!r}, only {', '.join(get_args(Backend))}.")
    if backend == "mosaic" and (problem := mosaic_problem(head_dim, recurrent_dtype, state_dtype, num_cells)):
        raise ValueError(f"The sLSTM backend 'mosaic' cannot compute this: {problem}. Use 'auto' or 'recompute'.")
    return backend


def _implementation(form: Form) -> Callable[..., Any]:
    match form:
        case "reference":
            return reference.slstm_reference
        case "recompute":
            return slstm_recompute
        case "mosaic":
            return _mosaic_of_any_width


def _mosaic_of_any_width(gates, recurrent, state, resets, mask):
    """Zero-pad heads and run the kernel: a cell without inputs and weights stays zero."""
    # Imported here, as it needs a newer JAX than the other forms.
    from xlstm_jax.kernels.slstm.hopper.sequence import slstm_mosaic

    units = gates.shape[-1]
    width = kernel_dim(units)
    wide = SLSTMState(*(pad_to(x, width) for x in state))
    result: Any = slstm_mosaic(pad_to(gates, width), pad_to(recurrent, width, 4, width), wide, resets, mask)
    hidden, last = result
    return hidden[..., :units], SLSTMState(*(x[..., :units] for x in last))


def _check(gates, recurrent, state, resets, mask):
    if gates.ndim != 5 or gates.shape[2] != 4:
        raise ValueError(f"gates has shape {gates.shape}, but must be [batch, positions, 4 gates, heads, head_dim].")
    if gates.shape[1] == 0:
        raise ValueError("The sequence has no positions; pass at least one.")
    rows = {"resets": resets, "mask": mask}
    shapes = {name: (x.shape, gates.shape[:2]) for name, x in rows.items() if x is not None}
    _check_shapes(gates, recurrent, state, shapes)


def _check_shapes(gates, recurrent, state, more):
    """Check all shapes against that of `gates`; `more` maps further names to the given and the required shape."""
    b, *_, h, d = gates.shape
    expected = {"recurrent": (recurrent.shape, (h, d, 4, d))}
    if state is not None:
        expected |= {f"state.{name}": (x.shape, (b, h, d)) for name, x in state._asdict().items()}
    for name, (shape, needed) in (expected | more).items():
        if shape != needed:
            raise ValueError(f"{name} has shape {shape}, but gates of shape {gates.shape} need {needed}.")
