"""Generation of tokens from a prompt: sampling, and the loop around a model."""
