"""Matmuls with custom gradients: several kernels on the same features, and float8."""
