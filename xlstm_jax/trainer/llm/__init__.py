"""Language models: their loss, and what a trainer needs beyond it."""
