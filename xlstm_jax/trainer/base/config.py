"""Config of a training run: steps, validation, logging and callbacks."""

import dataclasses
from typing import get_args

from xlstm_jax.common_types import LogMode
from xlstm_jax.configs import ConfigDict, ConfigError, check_numbers, check_seed, refuse_ignored
from xlstm_jax.trainer.base.guard import BadStepConfig
from xlstm_jax.trainer.callbacks.callback import CallbackConfig
from xlstm_jax.trainer.logger.base_logger import LoggerConfig


@dataclasses.dataclass(kw_only=True, frozen=False)
class TrainerConfig(ConfigDict):
    """Config of a training run: steps, validation, logging and callbacks."""

    seed: int = 0
    """The seed of the parameters, of dropout and of all other random numbers in training."""
    debug: bool = False
    """Run without compilation: slow, but a debugger can stop anywhere."""
    deterministic: bool = False
    """Compile steps that are bit-reproducible on a GPU: without atomic additions, and without autotuning, which may
    choose other matmuls after a restart. Slower. CPUs and TPUs are always reproducible."""
    donate_train_state: bool = True
    """Let a step overwrite its input state; otherwise both are in memory at once."""
    enable_progress_bar: bool = True
    """Whether progress is shown on the console."""
    gradient_accumulate_steps: int = 1
    """The number of minibatches that each device splits its rows into."""
    gradient_accumulate_scan: bool = False
    """Scan over minibatches instead of unrolling them."""
    check_val_every_n_epoch: int = 1
    """Validate after every n-th epoch; below 1, never."""
    check_val_every_n_steps: int = -1
    """Validate after every n-th step; below 1, never."""
    check_val_at_end: bool = False
    """Validate after the last step too, if a run validates at all."""
    check_for_nan: bool = True
    """Detect bad steps, and NaN in logged metrics."""
    bad_steps: BadStepConfig = dataclasses.field(default_factory=BadStepConfig)
    """The reaction to bad steps: NaN or a spike of the loss or the gradient norm."""
    log_grad_norm: bool = True
    """Log the norm of all gradients, before clipping."""
    log_grad_norm_per_param: bool = False
    """Log the gradient norm of each parameter too."""
    log_param_norm: bool = True
    """Log the norm of all parameters."""
    log_param_norm_per_param: bool = False
    """Log the norm of each parameter too."""
    log_intermediates: bool = False
    """Log the intermediates that models sow."""
    default_train_log_modes: list[str] = dataclasses.field(default_factory=lambda: ["mean"])
    """Log modes of training metrics without their own."""
    intermediates_log_modes: list[str] = dataclasses.field(default_factory=lambda: ["mean"])
    """Modes of the values that models sow."""
    logger: LoggerConfig | None = dataclasses.field(default_factory=LoggerConfig)
    """The logging of metrics and messages; `None` turns it off."""
    callbacks: list[CallbackConfig] = dataclasses.field(default_factory=list)
    """The callbacks of the run, called in this order."""
    seed_eval: int = 0
    """Seed of all random numbers in evaluations."""

    def __post_init__(self):
        check_numbers(self, TrainerConfig)
        for name in ("seed", "seed_eval"):
            check_seed(name, getattr(self, name))
        if self.deterministic and self.debug:
            raise ConfigError("deterministic has no effect with debug, which compiles no step: set only one of them.")
        if self.gradient_accumulate_steps < 1:
            raise ConfigError(f"gradient_accumulate_steps is {self.gradient_accumulate_steps}: it has to be 1 or more.")
        for name in ("default_train_log_modes", "intermediates_log_modes"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, but must be a list of modes.")
            unknown = [mode for mode in getattr(self, name) if mode not in get_args(LogMode)]
            if unknown:
                raise ConfigError(f"{name} has {unknown[0]!r}: choose from {', '.join(get_args(LogMode))}.")
        if not self.check_for_nan:
            refuse_ignored(self, {"bad_steps": "without check_for_nan"})

    def ignored_fields(self) -> dict[str, str]:
        """Return the fields that have no effect with the others, each with the reason."""
        reasons = {}
        if not self.log_grad_norm:
            reasons["log_grad_norm_per_param"] = "without log_grad_norm"
        if not self.log_param_norm:
            reasons["log_param_norm_per_param"] = "without log_param_norm"
        if not self.log_intermediates:
            reasons["intermediates_log_modes"] = "without log_intermediates"
        return reasons
