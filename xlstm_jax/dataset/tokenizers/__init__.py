"""Tokenizers: load them, train them, encode many texts at once, and the vocabulary that a model needs for them."""
