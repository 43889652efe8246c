"""Optimizers from a config: gradient clipping, the update rule, decoupled weight decay and the learning rate."""

import dataclasses
from collections.abc import Callable

import jax
import optax
from jax.typing import ArrayLike

from xlstm_jax.common_types import PyTree
from xlstm_jax.configs import FIXED, ConfigDict, ConfigError
from xlstm_jax.trainer.optimizer.ademamix import alpha_scheduler, beta3_scheduler, scale_by_ademamix
from xlstm_jax.trainer.optimizer.checks import (
    check_decay_rates,
    check_name,
    check_not_negative,
    check_patterns,
    check_positive,
    warn_of_ignored,
)
from xlstm_jax.trainer.optimizer.muon import scale_by_muon_and_adam
from xlstm_jax.trainer.optimizer.schedule_free import schedule_free_adamw
from xlstm_jax.trainer.optimizer.scheduler import SchedulerConfig, build_lr_scheduler
from xlstm_jax.trainer.optimizer.sharded import (
    clip_by_global_norm_replicated,
    clip_by_global_norm_sharded,
    scale_by_trust_ratio_sharded,
)
from xlstm_jax.utils.pytree_utils import get_param_mask_fn

WITHOUT_DECAY = ("adam", "sgd", "nadam", "adamax", "radam")
"""Names whose rule has no weight decay of its own: weight decay is inserted if `weight_decay` is positive."""

WITH_DECAY = ("adamw", "nadamw", "adamaxw", "lamb", "lion", "ademamix", "muon", "schedule_free_adamw")
"""Names whose rule has weight decay, with an entry in the optimizer state even if it is 0."""

OPTIMIZERS = (*WITHOUT_DECAY, *WITH_DECAY, "none")

NESTEROV = ("adam", "adamw", "nadam", "nadamw", "radam", "sgd", "muon", "none")
"""Names that accept `nesterov`; nadam and nadamw always use it, and none never updates."""

READERS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("beta2",): tuple(name for name in OPTIMIZERS if name != "sgd"),
    ("eps",): tuple(name for name in OPTIMIZERS if name not in ("sgd", "lion")),
    ("beta3", "alpha"): ("ademamix",),
    ("muon_exclude",): ("muon",),
    ("stacked_params",): ("lamb", "muon"),
}
"""Fields that only some optimizers use, each with the names of these."""

ADEMAMIX_WARMUP = 100_000
"""Warm-up steps of AdEMAMix if the schedule has no end."""


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(ConfigDict):
    """An optimizer with its learning rate, weight decay and gradient clipping.

    Weight decay is decoupled from the gradient and multiplied by the learning rate: without a gradient, a step
    subtracts `lr * weight_decay * p` from a parameter `p`. In `lamb` the trust ratio scales it as well.
    """

    name: str = dataclasses.field(metadata=FIXED)
    """One of adam, adamw, sgd, nadam, nadamw, adamax, adamaxw, radam, lamb, lion, ademamix, muon, schedule_free_adamw,
    or none, which never changes the parameters."""
    scheduler: SchedulerConfig = dataclasses.field(default_factory=lambda: SchedulerConfig(lr=1e-3))
    """The learning rate schedule."""
    beta1: float | None = 0.9
    """Decay rate of the momentum; `None` turns it off, only for `sgd`."""
    beta2: float = 0.999
    """Decay rate of the second moment; in `lion`, of the momentum in the optimizer state."""
    beta3: float = 0.9999
    """Decay rate of the slow momentum of `ademamix`."""
    alpha: float = 8.0
    """Weight of the slow momentum of `ademamix`."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.0
    """Decoupled weight decay; multiplied by the learning rate."""
    weight_decay_exclude: list[str] | None = None
    """Regular expressions for the names of parameters that do not decay."""
    weight_decay_include: list[str] | None = None
    """Regular expressions for the names of the only parameters that decay, except the excluded ones."""
    grad_clip_norm: float | None = None
    """Clip gradients to this global norm; `None` turns it off."""
    use_sharded_clip_norm: bool = True
    """Clip by the norm over all shards; `False` raises an error for sharded gradients."""
    grad_clip_value: float | None = None
    """Clip each entry of a gradient to this absolute value; `None` turns it off."""
    nesterov: bool = False
    """Use Nesterov momentum; Muon's author recommends it for `muon`."""
    muon_exclude: list[str] = dataclasses.field(default_factory=lambda: ["embed", "lm_head"])
    """Regular expressions for the names of matrices for which `muon` uses AdamW."""
    stacked_params: list[str] = dataclasses.field(default_factory=lambda: [r"(^|\.)block_stack\.block\."])
    """Regular expressions for the names of leaves that hold one parameter of each block along their first axis.
    `lamb` and `muon` treat each block separately, so that scanned blocks train like unrolled ones."""

    def __post_init__(self):
        check_name(self.name, kind="optimizer", known=OPTIMIZERS)
        if not isinstance(self.scheduler, ConfigDict):
            raise ConfigError(
                f"scheduler is {self.scheduler!r}: give a SchedulerConfig, such as SchedulerConfig(lr=1e-3)."
            )
        check_decay_rates(beta1=self.beta1, beta2=self.beta2, beta3=self.beta3)
        check_not_negative(alpha=self.alpha, eps=self.eps, weight_decay=self.weight_decay)
        check_positive(grad_clip_norm=self.grad_clip_norm, grad_clip_value=self.grad_clip_value)
        check_patterns(
            weight_decay_exclude=self.weight_decay_exclude,
            weight_decay_include=self.weight_decay_include,
            muon_exclude=self.muon_exclude,
            stacked_params=self.stacked_params,
        )
        _check_momentum(self)

    def ignored_fields(self) -> dict[str, str]:
        """Return the fields that have no effect with the others, each with the reason; empty for `none`."""
        if self.name == "none":
            return {}
        reasons = {
            field: f"on {self.name}" + (f", only on {' and '.join(readers)}" if len(readers) < 3 else "")
            for fields, readers in READERS.items()
            if self.name not in readers
            for field in fields
        }
        if not self.weight_decay:
            reasons |= dict.fromkeys(("weight_decay_exclude", "weight_decay_include"), "without weight_decay")
        if self.grad_clip_norm is None:
            reasons["use_sharded_clip_norm"] = "without grad_clip_norm"
        return reasons


def _check_momentum(config: OptimizerConfig) -> None:
    if config.beta1 is None and config.name not in ("sgd", "none"):
        raise ConfigError(f"beta1 is None, but {config.name} needs it. Only sgd can do without momentum.")
    if config.beta1 == 0 and config.name == "schedule_free_adamw":
        raise ConfigError("beta1 is 0, but schedule_free_adamw needs a positive one, such as 0.9.")
    if config.nesterov and config.name not in NESTEROV:
        raise ConfigError(
            f"nesterov is True, but {config.name} has no such variant. Use one of: {', '.join(NESTEROV)}."
        )
    if config.nesterov and config.name == "sgd" and config.beta1 is None:
        raise ConfigError("nesterov is True, but sgd has no momentum. Set beta1, such as 0.9.")


def build_optimizer(optimizer_config: OptimizerConfig) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Build the optimizer and its learning rate schedule.

    Args:
        optimizer_config: The config.

    Returns:
        The optimizer, with a state that starts with one entry for each kind of clipping, and the schedule.
    """
    if not isinstance(optimizer_config, ConfigDict):
        raise ValueError(f"optimizer_config is {optimizer_config!r}, but must be an OptimizerConfig.")
    warn_of_ignored(optimizer_config)
    schedule = build_lr_scheduler(optimizer_config.scheduler)
    before, after = build_gradient_transformations(optimizer_config)
    optimizer = build_optimizer_function(optimizer_config, schedule)
    return optax.chain(*before, optimizer, *after), schedule


def count_updates(opt_state: optax.OptState, *, otherwise: ArrayLike) -> ArrayLike:
    """Return the number of updates an optimizer has made, the argument of its schedule.

    Args:
        opt_state: The state of the optimizer.
        otherwise: The result if the state has no such count.
    """
    states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))
    return next((state.count for state in states if isinstance(state, optax.ScaleByScheduleState)), otherwise)


def build_optimizer_function(
    optimizer_config: OptimizerConfig, learning_rate: float | optax.Schedule
) -> optax.GradientTransformation:
    """Build the optimizer without clipping.

    Args:
        optimizer_config: The config; its scheduler is ignored.
        learning_rate: The learning rate, constant or a schedule.

    Returns:
        The optimizer, with the state of the optax optimizer of this name if there is one.
    """
    config = optimizer_config
    if config.name == "none":
        return optax.sgd(0.0)
    mask = _build_weight_decay_mask(config)
    if config.name == "schedule_free_adamw":
        return schedule_free_adamw(
            learning_rate,
            beta1=_require_momentum(config),
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=mask,
        )
    steps = [_build_rule(config)]
    if config.name in WITH_DECAY or config.weight_decay > 0:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask))
    if config.name == "lamb":
        steps.append(scale_by_trust_ratio_sharded(config.stacked_params))
    return optax.chain(*steps, optax.scale_by_learning_rate(learning_rate))


def build_gradient_transformations(
    optimizer_config: OptimizerConfig,
) -> tuple[list[optax.GradientTransformation], list[optax.GradientTransformation]]:
    """Build the gradient transformations around the optimizer: clipping by norm, then by value.

    Args:
        optimizer_config: The config.

    Returns:
        The transformations before the optimizer and those after it, of which there are none.
    """
    before = []
    if optimizer_config.grad_clip_norm is not None:
        sharded = optimizer_config.use_sharded_clip_norm
        clip = clip_by_global_norm_sharded if sharded else clip_by_global_norm_replicated
        before.append(clip(optimizer_config.grad_clip_norm))
    if optimizer_config.grad_clip_value is not None:
        before.append(optax.clip(optimizer_config.grad_clip_value))
    return before, []


def _build_weight_decay_mask(config: OptimizerConfig) -> Callable[[PyTree], PyTree] | None:
    if config.weight_decay_exclude is None and config.weight_decay_include is None:
        return None
    return get_param_mask_fn(config.weight_decay_exclude, config.weight_decay_include)


def _build_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    """Build the rule that computes an update direction from gradients, before weight decay and learning rate."""
    if config.name == "sgd":
        return optax.identity() if config.beta1 is None else optax.trace(config.beta1, nesterov=config.nesterov)
    beta1, beta2, eps, nesterov = _require_momentum(config), config.beta2, config.eps, config.nesterov
    match config.name:
        case "adam" | "adamw" | "lamb":
            return optax.scale_by_adam(beta1, beta2, eps, nesterov=nesterov)
        case "nadam" | "nadamw":
            return optax.scale_by_adam(beta1, beta2, eps, nesterov=True)
        case "adamax" | "adamaxw":
            return optax.scale_by_adamax(beta1, beta2, eps)
        case "radam":
            return optax.scale_by_radam(beta1, beta2, eps, nesterov=nesterov)
        case "lion":
            return optax.scale_by_lion(beta1, beta2)
        case "ademamix":
            return _build_ademamix_rule(config)
        case "muon":
            return scale_by_muon_and_adam(
                beta1=beta1,
                beta2=beta2,
                eps=eps,
                nesterov=nesterov,
                exclude=config.muon_exclude,
                stacked_params=config.stacked_params,
            )
        case _:
            raise AssertionError(f"Optimizer {config.name!r} has no rule.")


def _build_ademamix_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    beta1 = _require_momentum(config)
    warmup = config.scheduler.decay_steps or ADEMAMIX_WARMUP
    return scale_by_ademamix(
        beta1,
        config.beta2,
        config.beta3,
        config.alpha,
        beta3_scheduler(config.beta3, beta_start=beta1, warmup=warmup),
        alpha_scheduler(config.alpha, warmup=warmup),
        config.eps,
    )


def _require_momentum(config: OptimizerConfig) -> float:
    assert config.beta1 is not None, "The config refuses this."
    return config.beta1
