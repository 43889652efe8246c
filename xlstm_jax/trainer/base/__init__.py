"""The trainer and what it knows about parameters."""
