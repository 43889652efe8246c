"""Kernels of attention within documents for Hopper GPUs."""
