"""xLSTM language models in JAX: train, evaluate and sample."""

__version__ = "0.1.0"
