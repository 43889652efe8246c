"""Attention within documents in kernels for Hopper GPUs."""
