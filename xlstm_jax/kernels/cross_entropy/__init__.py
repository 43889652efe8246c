"""Cross-entropy over a vocabulary, computed from features without materialising all logits."""
