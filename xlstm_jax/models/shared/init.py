"""Initialisers by the names that model configs use."""

from typing import Literal

import numpy as np
from flax import linen as nn
from jax.nn.initializers import Initializer

InitDistribution = Literal["normal", "truncated_normal", "uniform"]
InitFnName = Literal["small", "wang", "wang2", "zeros"]

TRUNCATED_STDDEV = 0.87962566103423978
"""Standard deviation of a standard normal distribution truncated at two standard deviations."""


def small_init(dim: int, distribution: InitDistribution = "normal") -> Initializer:
    """Return an initialiser with standard deviation `sqrt(2 / (5 dim))`."""
    return _with_stddev(float(np.sqrt(2 / (5 * dim))), distribution)


def wang_init(dim: int, num_blocks: int, distribution: InitDistribution = "normal") -> Initializer:
    """Return an initialiser for layers that end a residual branch, with deviation `2 / (num_blocks sqrt(dim))`."""
    return _with_stddev(float(2 / num_blocks / np.sqrt(dim)), distribution)


def create_common_init_fn(
    fn_name: InitFnName, dim: int, num_blocks: int, distribution: InitDistribution = "normal"
) -> Initializer:
    """Return the initialiser with the given name; `wang2` counts two residual branches in each block."""
    match fn_name:
        case "small":
            return small_init(dim, distribution)
        case "wang":
            return wang_init(dim, num_blocks, distribution)
        case "wang2":
            return wang_init(dim, 2 * num_blocks, distribution)
        case "zeros":
            return nn.initializers.zeros
        case _:
            raise ValueError(f"There is no initialiser {fn_name!r}, only small, wang, wang2 and zeros.")


def uniform_init(min_val: float, max_val: float) -> Initializer:
    """Return an initialiser that draws from a uniform distribution."""
    spread = nn.initializers.uniform(max_val - min_val)
    return lambda key, shape, dtype=None, out_sharding=None: spread(key, shape, dtype, out_sharding) + min_val


def _with_stddev(stddev: float, distribution: InitDistribution) -> Initializer:
    match distribution:
        case "normal":
            return nn.initializers.normal(stddev)
        case "truncated_normal":
            return nn.initializers.truncated_normal(stddev / TRUNCATED_STDDEV)
        case "uniform":
            return uniform_init(-float(np.sqrt(3)) * stddev, float(np.sqrt(3)) * stddev)
        case _:
            raise ValueError(f"There is no distribution {distribution!r}, only normal, truncated_normal and uniform.")
