"""Adapters with which a step calls user functions: their rows, arguments and context."""

import contextvars
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from xlstm_jax.common_types import PyTree
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.array_utils import axis_size


class StepContext(NamedTuple):
    """The context of a step that is passed to a loss function."""

    train: bool = True
    """Whether it is a training step; otherwise it evaluates."""
    mutable_variables: PyTree = None
    """The variables of the model that are not parameters."""
    num_targets: jax.Array | None = None
    """The number of targets of the global batch, each counted once per device that has it; `None` if not counted."""
    num_parts: int | None = None
    """The number of minibatches of the global batch over all devices; `None` outside of a step."""


StepLoss = Callable[[PyTree, Callable, Batch, jax.Array, StepContext], Any]
"""A loss function as steps call it: `(params, apply_fn, batch, rng, context) -> (loss, (metrics, variables))`."""

_CONTEXT: contextvars.ContextVar[StepContext | None] = contextvars.ContextVar("step_context", default=None)


def current_context() -> StepContext | None:
    """Return the context of the step that is calling a documented loss function; `None` outside of a step.

    A loss function of the documented signature has no argument for the context, but needs it, even if an override calls
    it through `super`.
    """
    return _CONTEXT.get()


def documented_loss(function: Callable) -> StepLoss:
    """Adapt a loss function of the documented signature to the `StepLoss` signature.

    Args:
        function: Called as `function(params, apply_fn, batch, rng, train=train)`, and with `mutable_variables` if it
            has that parameter. `current_context` returns the context while it runs.
    """
    takes_variables = takes_argument(function, "mutable_variables")

    def call(params: PyTree, apply_fn: Callable, batch: Batch, rng: jax.Array, context: StepContext) -> Any:
        variables = {"mutable_variables": context.mutable_variables} if takes_variables else {}
        token = _CONTEXT.set(context)
        try:
            return function(params, apply_fn, batch, rng, train=context.train, **variables)
        finally:
            _CONTEXT.reset(token)

    return call


def takes_argument(function: Callable, name: str) -> bool:
    """Check whether a function has a parameter of the given name, or takes arbitrary keyword arguments."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def gather_rows(batch: Batch, axis_names: Sequence[str]) -> Batch:
    """All-gather rows over the pipeline and model axes, in the order of the devices."""
    shared = tuple(axis for axis in axis_names[2:] if axis_size(axis) > 1)
    return jax.tree.map(lambda x: lax.all_gather(x, shared, axis=0, tiled=True), batch) if shared else batch


def model_takes(apply_fn: Callable, argument: str) -> bool:
    """Check whether the model of an `apply` method can be called with an argument."""
    model = getattr(apply_fn, "__self__", None)
    return model is not None and argument in inspect.signature(type(model).__call__).parameters


def init_model_state(apply_fn: Callable, variables: Mapping[str, Any], num_rows: int) -> PyTree:
    """Return the state of a recurrent model before the first token."""
    model = getattr(apply_fn, "__self__", None)
    if model is not None and not hasattr(model, "init_state"):
        raise ValueError(
            f"{type(model).__name__} has no method init_state(num_rows), which generation and recurrent evaluation "
            "start from: add it, and the arguments state and return_state to __call__, or evaluate whole sequences "
            "(in lm-eval: use_infinite_eval=False)."
        )
    return apply_fn(variables, num_rows, method="init_state")


def describe(result: Any) -> str:
    """Describe the result of a function for an error message."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(describe, result))})"
    return f"an array of shape {result.shape}" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
