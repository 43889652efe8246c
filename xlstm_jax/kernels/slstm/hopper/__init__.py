"""Pallas Mosaic GPU kernels of the sLSTM for NVIDIA Hopper GPUs; they need JAX 0.11 or newer."""
