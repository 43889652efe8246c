"""Attention between the positions of documents that lie one after the other in a row."""
