"""From a prompt to tokens: sampling, and the loop around a model."""
