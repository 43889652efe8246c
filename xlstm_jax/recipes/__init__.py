"""Runs in plain YAML: packaged groups of settings, and the one strict way from them to configs."""
