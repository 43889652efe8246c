"""Turn models, data and optimizers into training runs."""
