"""xLSTM language models in JAX: train, evaluate, sample, serve and convert."""

__version__ = "0.1.0"
