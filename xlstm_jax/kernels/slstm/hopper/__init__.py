"""The sLSTM in kernels for NVIDIA's Hopper GPUs, in Pallas Mosaic GPU, which takes JAX 0.11 or newer."""
