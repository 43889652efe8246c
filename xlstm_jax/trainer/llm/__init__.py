"""Training of language models: loss, trainer and generation."""
