"""Helpers that all kernels for Hopper GPUs share: availability, launch, the ring of shared-memory stages, tiles."""
