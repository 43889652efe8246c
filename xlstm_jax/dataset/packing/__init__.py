"""Packing: how documents are laid out in the rows of batches."""
