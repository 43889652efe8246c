"""Norms over rows of numbers, each one pass over memory on Hopper GPUs."""

from xlstm_jax.kernels.norms.api import gated_head_norm, rms_norm, rms_norm_with_skip

__all__ = ["gated_head_norm", "rms_norm", "rms_norm_with_skip"]
