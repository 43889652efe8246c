"""Helpers that several operations share: padding, names for rematerialisation, logging, soft caps."""
