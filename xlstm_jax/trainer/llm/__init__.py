"""Language models: their loss, their trainer, and what a trainer needs beyond it."""
