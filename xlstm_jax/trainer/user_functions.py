"""How a step calls the functions that users write: with a device's rows, and with the arguments that they take."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from xlstm_jax.common_types import PyTree
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.array_utils import axis_size


def gather_rows(batch: Batch, axis_names: Sequence[str]) -> Batch:
    """Give all devices that differ only in the pipeline and model axes the rows of all of them, in their order."""
    shared = tuple(axis for axis in axis_names[2:] if axis_size(axis) > 1)
    return jax.tree.map(lambda x: lax.all_gather(x, shared, axis=0, tiled=True), batch) if shared else batch


def with_accepted(function: Callable, **arguments: Any) -> Callable:
    """Bind those of the arguments that a function has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    names = {parameter.name for parameter in parameters}
    accepted = {name: value for name, value in arguments.items() if takes_all or name in names}
    return lambda *positional: function(*positional, **accepted)


def model_takes(apply_fn: Callable, argument: str) -> bool:
    """Find out whether the model behind an `apply` can be called with an argument."""
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
    """Say what a function has returned, for an error."""
    if isinstance(result, tuple | list):
        return f"({', '.join(map(describe, result))})"
    return f"an array of shape {result.shape}" if isinstance(result, jax.Array) else f"a {type(result).__name__}"
