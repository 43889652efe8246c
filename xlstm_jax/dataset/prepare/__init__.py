"""Tokenise documents once, before training: what `xlstm-jax prepare` calls."""

from xlstm_jax.dataset.prepare.api import prepare as prepare
