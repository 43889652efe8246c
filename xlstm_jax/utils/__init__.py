"""Trees of parameters and the boxes that name their mesh axes, and logging of errors."""

from xlstm_jax.utils.pytree_utils import (
    delete_arrays_in_pytree,
    flatten_dict,
    flatten_pytree,
    get_shape_dtype_pytree,
    pytree_diff,
    pytree_key_path_to_str,
)

__all__ = [
    "delete_arrays_in_pytree",
    "flatten_dict",
    "flatten_pytree",
    "get_shape_dtype_pytree",
    "pytree_diff",
    "pytree_key_path_to_str",
]
