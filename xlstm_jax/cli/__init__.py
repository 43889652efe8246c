"""The command line `xlstm-jax`: one module per command."""
