"""The checks of `xlstm-jax doctor`: each is a function that returns a `Section`."""
