"""Matmuls with custom gradients: several kernels with shared features, and float8."""
