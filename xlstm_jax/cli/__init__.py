"""The command `xlstm-jax`: one file a command."""
