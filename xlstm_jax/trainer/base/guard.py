"""Bad steps: the device detects updates that would damage the parameters, and does not apply them.

A step is bad if its loss or the norm of its gradients is not finite, or is many times the average over the good steps
so far. All devices make the same decision. With the policy `skip` the run continues with the next batch. With `stop`
and `rollback` the state stays that before the first bad step, and rejects all further updates, until the host reacts.
"""

import dataclasses
from typing import Literal, NamedTuple, TypeVar, get_args

import jax
import jax.numpy as jnp
from jax import lax

from xlstm_jax.configs import ConfigDict, ConfigError, refuse_ignored

BadStepPolicy = Literal["stop", "skip", "rollback"]
Tree = TypeVar("Tree")

AVERAGE_DECAY = 0.99


@dataclasses.dataclass(kw_only=True, frozen=False)
class BadStepConfig(ConfigDict):
    """Config of bad steps: their criteria, and the reaction of the run."""

    policy: BadStepPolicy = "stop"
    """`stop` ends the run; `skip` continues with the next batch; `rollback` returns to the last checkpoint and skips
    the batch from then on. In all cases the update is not applied."""
    loss_spike_factor: float | None = None
    """A loss above this multiple of its average is bad; with `None`, only NaN and infinity are."""
    grad_norm_spike_factor: float | None = None
    """The same for the norm of the gradients."""
    spike_warmup_steps: int = 100
    """The number of good steps before spikes are detected."""
    max_rollbacks: int = 10
    """The number of rollbacks after which the run fails."""
    max_skipped_share: float = 0.1
    """With `skip`, a run that has skipped a larger share of its steps ends with the status `skipped`, not `success`."""

    def __post_init__(self):
        if self.policy not in get_args(BadStepPolicy):
            raise ConfigError(f"policy is {self.policy!r}: choose from {', '.join(get_args(BadStepPolicy))}.")
        for name in ("loss_spike_factor", "grad_norm_spike_factor"):
            factor = getattr(self, name)
            if factor is not None and factor <= 1:
                raise ConfigError(f"{name} is {factor}, but has to be above 1: it multiplies an average.")
        for name in ("spike_warmup_steps", "max_rollbacks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: it has to be 1 or more.")
        if not 0 <= self.max_skipped_share <= 1:
            raise ConfigError(f"max_skipped_share is {self.max_skipped_share}: it has to be between 0 and 1.")
        refuse_ignored(self, self.ignored_fields())

    def ignored_fields(self) -> dict[str, str]:
        """Return the fields that have no effect with the others, each with the reason."""
        readers = {"max_rollbacks": "rollback", "max_skipped_share": "skip"}
        reasons = {
            field: f"with the policy {self.policy}, only with {reader}"
            for field, reader in readers.items()
            if self.policy != reader
        }
        if self.loss_spike_factor is None and self.grad_norm_spike_factor is None:
            reasons["spike_warmup_steps"] = "without loss_spike_factor and grad_norm_spike_factor"
        return reasons


class GuardState(NamedTuple):
    """Counts and averages of the steps so far; a part of the train state."""

    num_good: jax.Array
    num_bad: jax.Array
    first_bad: jax.Array
    """The first bad step since the last reset by the host; 0 if there was none."""
    loss_average: jax.Array
    grad_norm_average: jax.Array

    @staticmethod
    def create() -> "GuardState":
        """Return the state before the first step."""
        return GuardState(*(jnp.zeros((), dtype) for dtype in 3 * (jnp.int32,) + 2 * (jnp.float32,)))


class Verdict(NamedTuple):
    """The decision about a step."""

    is_bad: jax.Array
    is_frozen: jax.Array
    """Whether an earlier bad step stopped the run."""

    @property
    def is_applied(self) -> jax.Array:
        """Whether the update is applied."""
        return ~(self.is_bad | self.is_frozen)


def judge(
    guard: GuardState,
    config: BadStepConfig,
    *,
    step: jax.Array,
    loss: jax.Array,
    grad_norm: jax.Array,
    axis_names: tuple[str, ...],
) -> tuple[Verdict, GuardState]:
    """Decide about a step, inside `jax.shard_map`.

    Args:
        guard: The counts and averages of the steps so far.
        config: Which steps are bad.
        step: The number of the step, from 1.
        loss: The loss over all devices.
        grad_norm: The norm of the gradients over all devices.
        axis_names: The mesh axes.

    Returns:
        The verdict on the step, the same on all devices, and the counts and averages including it.
    """
    is_bad = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
    is_warm = guard.num_good >= config.spike_warmup_steps
    averages = (loss, guard.loss_average), (grad_norm, guard.grad_norm_average)
    for factor, (value, average) in zip(
        (config.loss_spike_factor, config.grad_norm_spike_factor), averages, strict=True
    ):
        if factor is not None:
            is_bad |= is_warm & (value - average > (factor - 1) * jnp.abs(average))  # A loss may be negative.
    is_bad = lax.pmax(is_bad.astype(jnp.int32), axis_names) > 0
    is_frozen = (guard.first_bad > 0) & (config.policy != "skip")
    verdict = Verdict(is_bad & ~is_frozen, is_frozen)

    weight = jnp.maximum(1 - AVERAGE_DECAY, 1 / (guard.num_good + 1))  # At first the plain mean, then a moving one.
    loss_average, grad_norm_average = (
        jnp.where(verdict.is_applied, average + weight * (value - average), average) for value, average in averages
    )
    first_bad = jnp.where(verdict.is_bad & (guard.first_bad == 0), step, guard.first_bad)
    return verdict, GuardState(
        num_good=guard.num_good + verdict.is_applied,
        num_bad=guard.num_bad + verdict.is_bad,
        first_bad=first_bad.astype(jnp.int32),
        loss_average=loss_average,
        grad_norm_average=grad_norm_average,
    )


def select(condition: jax.Array, new: Tree, old: Tree) -> Tree:
    """Select one of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)
