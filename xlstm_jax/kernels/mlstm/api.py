"""Public functions for the mLSTM: any length, any chunk size, and selection of the fastest form for the device."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from xlstm_jax.kernels.mlstm import reference
from xlstm_jax.kernels.mlstm.chunkwise import mlstm_chunkwise
from xlstm_jax.kernels.mlstm.gates import InputGate, log_input_gate
from xlstm_jax.kernels.mlstm.hopper.tiling import CHUNK_SIZES, HEAD_DIMS, choose_tiling, tiling_problem
from xlstm_jax.kernels.mlstm.parallel import mlstm_parallel
from xlstm_jax.kernels.mlstm.state import MLSTMState, empty_state, state_dtype
from xlstm_jax.kernels.mosaic_gpu.availability import hopper_unavailable_reason
from xlstm_jax.kernels.shared.log_once import log_once
from xlstm_jax.kernels.shared.materialize import materialize
from xlstm_jax.kernels.shared.padding import pad_to

LOGGER = logging.getLogger(__name__)

FEW_POSITIONS = 2048
"""The number of positions of all heads up to which plain JAX is faster than launching kernels that carry a state or
need padded heads."""

LARGEST_KERNEL_EPS = 1e-4
"""The largest `eps` for the kernels, which omit the gradient of the stabiliser through `eps`: a relative error of about
three times `eps`."""

Form = Literal["reference", "parallel", "chunkwise", "mosaic"]
Backend = Literal["auto", "reference", "parallel", "chunkwise", "mosaic"]


def mlstm(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    igate: Float[Array, "b s h"],
    fgate: Float[Array, "b s h"],
    *,
    state: MLSTMState | None = None,
    return_state: bool = False,
    resets: Bool[Array, "b s"] | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
    input_gate: InputGate = "exp",
    eps: float = 1e-6,
) -> Float[Array, "b s h v"] | tuple[Float[Array, "b s h v"], MLSTMState]:
    """Run sequences through an mLSTM cell.

    Args:
        q: Queries; they are scaled by `1/sqrt(k)` here.
        k: Keys.
        v: Values.
        igate: Pre-activations of the input gates.
        fgate: Pre-activations of the forget gates, whose activation is the sigmoid.
        state: The memory before the first position; empty by default.
        return_state: Whether to also return the memory after the last position.
        resets: The positions at which documents start: the memory is emptied before them.
        chunk_size: The chunk size of the chunkwise form in plain JAX. It changes speed and memory, not results; the
            kernels for GPUs choose their own.
        backend: The form of the computation; `auto` selects the fastest for this device: on Hopper GPUs, for bfloat16
            and heads up to 256/512, the kernels `mosaic`, otherwise and for short prompts `chunkwise`.
        input_gate: The activation of the input gates.
        eps: Added to the denominator of the outputs, in units of the stabiliser. Above 1e-4, `auto` does not use the
            kernels for GPUs.

    Returns:
        The hidden states, and the last state if requested.
    """
    _check(q, k, v, igate, fgate, state, resets, chunk_size)
    _check_eps(eps)
    dtype = state_dtype(v.dtype)
    log_input = log_input_gate(igate.astype(dtype), input_gate)
    log_forget = jax.nn.log_sigmoid(fgate.astype(dtype))
    b, s, h, qk_dim = q.shape
    form = resolve_backend(backend, v.dtype, qk_dim, v.shape[-1], eps)
    does_more = state is not None or return_state or _is_padded(qk_dim, v.shape[-1])
    if backend == "auto" and form == "mosaic" and does_more and _is_small(b, s, h):
        log_once(LOGGER, "mLSTM, for a few positions: the chunkwise form in plain JAX.")
        form, chunk_size = "chunkwise", s
    if state is not None:
        state = materialize(_in_constant_units(_cast(state, dtype)))
    elif form != "mosaic":  # the `mosaic` kernels initialise the memory themselves
        state = materialize(empty_state(b, h, qk_dim, v.shape[-1], dtype))
    hidden, last = _implementation(form, chunk_size, eps, return_state)(q, k, v, log_input, log_forget, state, resets)
    return (hidden, _in_constant_units(last)) if return_state else hidden


def mlstm_step(
    q: Float[Array, "b h k"],
    k: Float[Array, "b h k"],
    v: Float[Array, "b h v"],
    igate: Float[Array, "b h"],
    fgate: Float[Array, "b h"],
    state: MLSTMState,
    *,
    backend: Backend = "auto",
    input_gate: InputGate = "exp",
    eps: float = 1e-6,
) -> tuple[Float[Array, "b h v"], MLSTMState]:
    """Run one token through an mLSTM cell: the arguments and results of `mlstm` without the sequence axis.

    `auto` uses the kernel for Hopper GPUs if possible, and `mosaic` always, except for heads that need padding, which
    only sequences support; all other backends use plain JAX.
    """
    _check_step(q, k, v, igate, fgate, state)
    _check_eps(eps)
    state = _in_constant_units(state)
    dtype = state.memory.dtype
    log_input = log_input_gate(igate.astype(dtype), input_gate)
    log_forget = jax.nn.log_sigmoid(fgate.astype(dtype))
    problem = hopper_unavailable_reason() if backend in ("auto", "mosaic") else f"{backend} is the backend"
    if problem is None:
        from xlstm_jax.kernels.mlstm.hopper.step import mosaic_step, step_problem

        problem = step_problem(q, k, v, state)
        if problem is None:
            log_once(LOGGER, "mLSTM, token by token: the kernel for Hopper GPUs.")
            hidden, state = mosaic_step(state, q, k, v, log_input, log_forget, eps=eps)
            return hidden.astype(v.dtype), _in_constant_units(state)
    qk_dim, v_dim = q.shape[-1], v.shape[-1]
    is_for_sequences = _is_padded(qk_dim, v_dim) and tiling_problem(qk_dim, v_dim) is None
    if backend == "mosaic" and (hopper_unavailable_reason() or not is_for_sequences):
        raise ValueError(f"The mLSTM backend 'mosaic' cannot take a token here: {problem}. Choose 'auto'.")
    log_once(LOGGER, f"mLSTM, token by token: plain JAX, as {problem}.")
    q, k = q.astype(dtype), k.astype(dtype)
    hidden, state = reference.step(state, q, k, v.astype(dtype), log_input, log_forget, eps=eps)
    return hidden.astype(v.dtype), _in_constant_units(state)


def _is_small(b: int, s: int, h: int) -> bool:
    return s <= CHUNK_SIZES[-1] and b * s * h <= FEW_POSITIONS


def _is_padded(qk_dim: int, v_dim: int) -> bool:
    return (qk_dim, v_dim) not in HEAD_DIMS


def _cast(state: MLSTMState, dtype: jnp.dtype) -> MLSTMState:
    return MLSTMState(*(x.astype(dtype) for x in state))


def _in_constant_units(state: MLSTMState) -> MLSTMState:
    """Stop the gradient of the stabiliser, which is a choice of units in a state."""
    return state._replace(stabilizer=lax.stop_gradient(state.stabilizer))


def choose_backend(
    dtype: DTypeLike = jnp.bfloat16, qk_dim: int = 256, v_dim: int = 512, eps: float = 1e-6
) -> tuple[Form, str]:
    """Return the form that `auto` selects on this device, and the reason to log.

    Args:
        dtype: The dtype of queries, keys and values.
        qk_dim: The size of a head's queries and keys.
        v_dim: The size of a head's values.
        eps: The number that is added to the denominator.
    """
    if problem := mosaic_problem(dtype, qk_dim, v_dim, eps):
        return "chunkwise", f"the chunkwise form in plain JAX, as {problem}"
    reason = "the chunkwise form in kernels for Hopper GPUs"
    if _is_padded(qk_dim, v_dim):
        tiling = choose_tiling(qk_dim, v_dim, 1)
        reason += f", with heads of {qk_dim}/{v_dim} filled up to {tiling.qk_dim}/{tiling.v_dim}"
    return "mosaic", reason


def mosaic_problem(dtype: DTypeLike, qk_dim: int, v_dim: int, eps: float = 1e-6) -> str | None:
    """Return why the kernels for Hopper GPUs cannot be used here, or `None` if they can."""
    if problem := hopper_unavailable_reason():
        return problem
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"the kernels for Hopper GPUs compute in bfloat16, and this is {jnp.dtype(dtype).name}"
    if eps > LARGEST_KERNEL_EPS:
        return (
            f"the kernels for Hopper GPUs have exact gradients up to an eps of {LARGEST_KERNEL_EPS}, and this is {eps}"
        )
    return tiling_problem(qk_dim, v_dim)


def resolve_backend(
    backend: Backend, dtype: DTypeLike = jnp.bfloat16, qk_dim: int = 256, v_dim: int = 512, eps: float = 1e-6
) -> Form:
    """Return the form to use on this device, and log the choice of `auto`.

    Raises a `ValueError` with the reason if the form is not supported.

    The arguments after the first are those of `choose_backend`.
    """
    if backend == "auto":
        form, reason = choose_backend(dtype, qk_dim, v_dim, eps)
        log_once(LOGGER, f"mLSTM: {reason}.")
        return form
    if backend not in get_args(Form):
        raise ValueError(f"There is no mLSTM backend {backend!r}, only {', '.join(get_args(Backend))}.")
    if backend == "mosaic" and (problem := mosaic_problem(dtype, qk_dim, v_dim, eps)):
        raise ValueError(f"The mLSTM backend 'mosaic' cannot run here: {problem}. Choose 'auto' or 'chunkwise'.")
    return backend


def _implementation(
    form: Form, chunk_size: int, eps: float, return_state: bool
) -> Callable[..., tuple[jax.Array, Any]]:
    match form:
        case "reference":
            return functools.partial(reference.mlstm_reference, eps=eps)
        case "parallel":
            return functools.partial(mlstm_parallel, eps=eps)
        case "chunkwise":
            return functools.partial(_chunkwise_of_any_length, chunk_size=chunk_size, eps=eps)
        case "mosaic":
            return functools.partial(_mosaic_of_any_shape, eps=eps, return_state=return_state)


def _chunkwise_of_any_length(q, k, v, log_input, log_forget, state, resets, *, chunk_size, eps):
    chunk_size = min(chunk_size, q.shape[1])
    arrays = _padded(q, k, v, log_input, log_forget, resets, multiple=chunk_size)
    result: Any = mlstm_chunkwise(*arrays[:5], state, arrays[5], chunk_size, eps)
    hidden, last = result
    return hidden[:, : q.shape[1]], last


def _mosaic_of_any_shape(q, k, v, log_input, log_forget, state, resets, *, eps, return_state):
    # Imported here, as it needs a newer JAX than the other forms.
    from xlstm_jax.kernels.mlstm.hopper.chunkwise import mlstm_mosaic

    (_, s, _, qk_dim), v_dim = q.shape, v.shape[-1]
    tiling = choose_tiling(qk_dim, v_dim, s)
    keys, values = tiling.qk_dim, tiling.v_dim
    if state is not None:
        state = MLSTMState(pad_to(state.memory, keys, values), pad_to(state.normalizer, keys), state.stabilizer)
    q, k, v = pad_to(q, keys), pad_to(k, keys), pad_to(v, values)
    arrays = _padded(q, k, v, log_input, log_forget, resets, multiple=tiling.chunk_size)
    # Traced and lowered once for all layers of a model, which takes seconds.
    run: Any = jax.jit(mlstm_mosaic, static_argnums=(7, 8, 9, 10, 11))
    hidden, last = run(*arrays[:5], state, arrays[5], tiling, eps, None, return_state, qk_dim**-0.5)
    if last is not None:
        last = MLSTMState(last.memory[..., :qk_dim, :v_dim], last.normalizer[..., :qk_dim], last.stabilizer)
    return hidden[:, :s, :, :v_dim], last


def _padded(q, k, v, log_input, log_forget, resets, *, multiple):
    """Pad a sequence to a multiple of a length, with positions that do not change the memory."""
    padding = -q.shape[1] % multiple

    def padded(x: jax.Array, value: float = 0) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), constant_values=value) if padding else x

    resets = None if resets is None else padded(resets)
    return padded(q), padded(k), padded(v), padded(log_input, -jnp.inf), padded(log_forget), resets


def _check(q, k, v, igate, fgate, state, resets, chunk_size):
    for name, x in (("q", q), ("v", v)):
        if x.ndim != 4:
            wanted = "[batch, positions, heads, head_dim]; mlstm_step takes single tokens"
            raise ValueError(f"{name} has shape {x.shape}, but must be {wanted}.")
    b, s = q.shape[:2]
    if s == 0:
        raise ValueError("The sequence has no positions; pass at least one.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, but must be at least 1.")
    shapes = {} if resets is None else {"resets": (resets.shape, (b, s))}
    _check_shapes(q, k, v, igate, fgate, state, shapes)


def _check_step(q, k, v, igate, fgate, state):
    for name, x in (("q", q), ("v", v)):
        if x.ndim != 3:
            wanted = "[batch, heads, head_dim]; mlstm takes whole sequences"
            raise ValueError(f"{name} has shape {x.shape}, but must be {wanted}.")
    _check_shapes(q, k, v, igate, fgate, state, {})


def _check_eps(eps):
    if not eps >= 0:  # NaN too
        raise ValueError(f"eps is {eps}, but must be a number of at least 0.")


def _check_shapes(q, k, v, igate, fgate, state, more):
    """Check all shapes against those of `q` and `v`; `more` maps further names to the given and the required shape."""
    *rows, qk_dim = q.shape
    needed_shapes = {"k": (k.shape, q.shape), "v": (v.shape, (*rows, v.shape[-1]))}
    needed_shapes |= {name: (gate.shape, tuple(rows)) for name, gate in (("igate", igate), ("fgate", fgate))}
    if state is not None:
        empty = jax.eval_shape(lambda: empty_state(rows[0], rows[-1], qk_dim, v.shape[-1]))
        fields = zip(empty._fields, state, empty, strict=True)
        needed_shapes |= {f"state.{name}": (given.shape, needed.shape) for name, given, needed in fields}
    for name, (shape, needed) in (needed_shapes | more).items():
        if shape != needed:
            given = f"q of shape {q.shape} and v of shape {v.shape}"
            raise ValueError(f"{name} has shape {shape}, but {given} need {needed}.")
