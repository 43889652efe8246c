"""Utilities for pytrees and `nn.Partitioned` leaves, files, accelerators and error logging."""

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
