"""Configs: dataclasses that convert to plain dictionaries for logs and checkpoints, and back."""

from xlstm_jax.configs.checks import (
    FIXED,
    MAY_CHANGE,
    check_least,
    check_numbers,
    check_seed,
    describe_ignored,
    fixed_settings,
    refuse_ignored,
)
from xlstm_jax.configs.config import ConfigDict
from xlstm_jax.configs.errors import ConfigError, nearest
from xlstm_jax.configs.plain import flat_config, to_plain

__all__ = [
    "FIXED",
    "MAY_CHANGE",
    "ConfigDict",
    "ConfigError",
    "check_least",
    "check_numbers",
    "check_seed",
    "describe_ignored",
    "fixed_settings",
    "flat_config",
    "nearest",
    "refuse_ignored",
    "to_plain",
]
