"""Norms over rows, with fused single-pass kernels for Hopper GPUs."""

from xlstm_jax.kernels.norms.api import gated_head_norm, rms_norm, rms_norm_with_skip

__all__ = ["gated_head_norm", "rms_norm", "rms_norm_with_skip"]
