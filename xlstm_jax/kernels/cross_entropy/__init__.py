"""Cross-entropy over a vocabulary, from features: what it needs of the logits, without keeping them."""
