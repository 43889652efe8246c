"""Kernels: arrays to arrays, one recurrence in several forms."""
