"""Evaluation of trained models on public benchmark tasks."""
