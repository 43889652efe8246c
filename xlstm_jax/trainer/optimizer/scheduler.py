"""Learning rate schedules: a linear warm-up, a main part by name and a cool-down, without jumps between them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax

from xlstm_jax.configs import ConfigDict, ConfigError
from xlstm_jax.trainer.optimizer.checks import check_name, check_not_negative, check_whole, warn_of_ignored

DECAYING = ("linear", "cosine_decay", "exponential_decay")
"""Names whose main part decays from `lr` to `end_lr`."""

LEVEL = ("constant", "warmup_stable_decay")
"""Names whose main part is constant at `lr`."""


@dataclasses.dataclass(kw_only=True)
class SchedulerConfig(ConfigDict):
    """Learning rate schedule of a run.

    The learning rate rises linearly from 0 to `lr` in the first `warmup_steps`. The main part follows, as given by
    `name`. In the last `cooldown_steps` of the `decay_steps`, the learning rate goes to `cooldown_lr`: linearly, or as
    1 - sqrt for `warmup_stable_decay`. After that it is constant, except that `exponential_decay` without a cool-down
    continues to decay.
    """

    lr: float
    """Learning rate at the end of the warm-up."""
    name: str = "constant"
    """One of constant, linear, cosine_decay, exponential_decay, warmup_stable_decay."""
    decay_steps: int | None = 0
    """Length of the whole schedule, warm-up and cool-down included; 0 or `None` if it has no end."""
    end_lr: float | None = None
    """Learning rate at the end of the main part, 0 by default; `constant` ends its main part at `lr`."""
    end_lr_factor: float | None = None
    """`end_lr` as a fraction of `lr`: give one of the two, or both if they agree."""
    cooldown_steps: int = 0
    """Length of the cool-down at the end of the schedule."""
    warmup_steps: int = 0
    """Length of the linear warm-up at the start of the schedule."""
    cooldown_lr: float = 0.0
    """Learning rate at the end of the cool-down."""

    def __post_init__(self):
        check_name(self.name, kind="scheduler", known=(*LEVEL[:1], *DECAYING, *LEVEL[1:]))
        if self.lr is None:
            raise ConfigError("lr is None: give the learning rate, such as 1e-3.")
        check_not_negative(
            lr=self.lr,
            decay_steps=self.decay_steps,
            end_lr=self.end_lr,
            end_lr_factor=self.end_lr_factor,
            cooldown_steps=self.cooldown_steps,
            warmup_steps=self.warmup_steps,
            cooldown_lr=self.cooldown_lr,
        )
        check_whole(decay_steps=self.decay_steps, cooldown_steps=self.cooldown_steps, warmup_steps=self.warmup_steps)
        _check_ends_agree(self)
        _check_lengths(self)
        _check_main_part(self)

    def ignored_fields(self) -> dict[str, str]:
        """Return the fields that have no effect with the others, each with the reason."""
        reasons = {}
        if self.name == "constant":
            reasons |= dict.fromkeys(("end_lr", "end_lr_factor"), "on the schedule constant, which stays at lr")
        if not self.cooldown_steps:
            reasons["cooldown_lr"] = "without cooldown_steps"
        return reasons


def build_lr_scheduler(scheduler_config: SchedulerConfig) -> optax.Schedule:
    """Build the learning rate scheduler.

    Args:
        scheduler_config: The config.

    Returns:
        A function from the step, a Python integer or a traced one, to the learning rate.
    """
    config = scheduler_config
    warn_of_ignored(config)
    pieces, boundaries = [_build_main_part(config)], []
    if config.warmup_steps:
        pieces.insert(0, optax.linear_schedule(0.0, config.lr, config.warmup_steps))
        boundaries.append(config.warmup_steps)
    if config.cooldown_steps:
        pieces.append(_build_cooldown(config))
        boundaries.append(config.warmup_steps + _num_main_steps(config))
    return optax.join_schedules(pieces, boundaries)


def _build_main_part(config: SchedulerConfig) -> optax.Schedule:
    start, end, steps = config.lr, _main_end_lr(config), _num_main_steps(config)
    if config.name in LEVEL or steps == 0:
        return optax.constant_schedule(start)
    if config.name == "linear":
        return optax.linear_schedule(start, end, steps)
    if config.name == "exponential_decay":
        return optax.exponential_decay(start, steps, end / start)
    above_end = optax.cosine_decay_schedule(start - end, steps)
    return lambda step: end + above_end(step)


def _build_cooldown(config: SchedulerConfig) -> optax.Schedule:
    build = _one_minus_sqrt_schedule if config.name == "warmup_stable_decay" else optax.linear_schedule
    return build(_main_end_lr(config), config.cooldown_lr, config.cooldown_steps)


def _one_minus_sqrt_schedule(start: float, end: float, steps: int) -> optax.Schedule:
    """Build a schedule from `start` to `end` whose distance to `end` shrinks as 1 - sqrt(step / steps)."""

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.sqrt(jnp.clip(step / steps, 0.0, 1.0))
        return (1.0 - progress) * start + progress * end

    return schedule


def _main_end_lr(config: SchedulerConfig) -> float:
    """Return the learning rate at the end of the main part."""
    if config.name in LEVEL:
        return config.lr
    if config.end_lr is not None:
        return config.end_lr
    return config.lr * config.end_lr_factor if config.end_lr_factor is not None else 0.0


def _num_main_steps(config: SchedulerConfig) -> int:
    return (config.decay_steps or 0) - config.warmup_steps - config.cooldown_steps


def _check_ends_agree(config: SchedulerConfig) -> None:
    if config.end_lr is None or config.end_lr_factor is None:
        return
    expected = config.lr * config.end_lr_factor
    # Equal up to rounding of the product: 3e-4 * 0.1 is not 3e-5 in binary.
    if not math.isclose(config.end_lr, expected, rel_tol=1e-12):
        raise ConfigError(
            f"end_lr {config.end_lr} and end_lr_factor {config.end_lr_factor} disagree: with lr {config.lr} the factor "
            f"gives {expected}. Give only one of them."
        )


def _check_lengths(config: SchedulerConfig) -> None:
    if not config.decay_steps:
        if config.name != "constant" or config.cooldown_steps:
            raise ConfigError(
                f"decay_steps is {config.decay_steps}, but a {config.name} schedule with {config.cooldown_steps} "
                "cool-down steps must have an end. Set decay_steps to the number of steps of the run."
            )
    elif _num_main_steps(config) < 0:
        raise ConfigError(
            f"warmup_steps {config.warmup_steps} plus cooldown_steps {config.cooldown_steps} are more than decay_steps "
            f"{config.decay_steps}, the whole schedule (num_train_steps in recipes): lower them, or raise it."
        )


def _check_main_part(config: SchedulerConfig) -> None:
    end = _main_end_lr(config)
    if config.name == "warmup_stable_decay":
        if not config.cooldown_steps:
            raise ConfigError("warmup_stable_decay needs cooldown_steps > 0: its decay is the cool-down.")
        if config.end_lr is not None or config.end_lr_factor is not None:
            raise ConfigError("warmup_stable_decay stays at lr and has no end_lr. Set cooldown_lr instead.")
    if config.name == "exponential_decay" and not (config.lr > 0 and end > 0):
        raise ConfigError(
            f"exponential_decay from {config.lr} to {end} is not defined: lr and end_lr (or end_lr_factor) must be "
            "positive."
        )
    if config.name in DECAYING and _num_main_steps(config) == 0 and end != config.lr:
        raise ConfigError(
            f"warmup_steps {config.warmup_steps} and cooldown_steps {config.cooldown_steps} leave no step of "
            f"decay_steps {config.decay_steps} to get from lr {config.lr} to end_lr {end}. Raise decay_steps, or use "
            "the name constant."
        )
