"""Evaluation of trained models on the tasks of others."""
