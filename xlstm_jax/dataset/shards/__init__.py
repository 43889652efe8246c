"""Shards of records on disk: what `prepare` writes and training reads."""
