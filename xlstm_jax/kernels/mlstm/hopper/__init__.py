"""Pallas Mosaic GPU kernels of the mLSTM for NVIDIA Hopper GPUs; they need JAX 0.11 or newer."""
