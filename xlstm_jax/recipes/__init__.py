"""Runs described in plain YAML: packaged groups of settings, their composition, and the configs built from them."""
