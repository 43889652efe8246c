"""Types shared by all layers of the package."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict
from flax.training import train_state

PyTree = Any
Parameter = jax.Array | nn.Partitioned
PRNGKeyArray = jax.Array

LogMode = Literal["mean", "mean_nopostfix", "single", "max", "std", "single_noreduce", "single_noreduce_wcount"]

ImmutableMetricElement = FrozenDict[LogMode, FrozenDict[str, jax.Array | int | float]]
ImmutableMetrics = FrozenDict[str, ImmutableMetricElement]
MutableMetricElement = dict[LogMode, dict[str, jax.Array | int | float]]
MutableMetrics = dict[str, MutableMetricElement]
MetricElement = ImmutableMetricElement | MutableMetricElement
Metrics = ImmutableMetrics | MutableMetrics
"""Metrics accumulated on the device: name → log mode → sums and counts."""

StepMetricsElement = (
    jax.Array | int | float | dict[Literal["value", "count", "log_modes"], jax.Array | int | float | Sequence[LogMode]]
)
StepMetrics = dict[str, StepMetricsElement]
"""The metrics that a loss function returns: name → a scalar, or its value, count and log modes."""

HostMetricElement = float | int | np.ndarray
HostMetrics = dict[str, HostMetricElement]
"""Metrics on the host, ready to be logged."""


class TrainState(train_state.TrainState):
    """Flax's train state with a random key, non-parameter variables and a record of bad steps (`guard`).

    Fields hold arrays or, after a tree map, other leaves such as shapes, partition specs and gradients.
    """

    step: Any
    params: PyTree
    mutable_variables: Any = None
    rng: Any = None
    guard: Any = None
