"""What the config of an xLSTM refuses, and the checks that it shares with other models."""

import dataclasses
import math
import re

import jax.numpy as jnp
import pytest

from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.llama import LlamaConfig
from xlstm_jax.models.shared.checks import check_parallel, check_tokens
from xlstm_jax.models.xlstm import XLSTMConfig

BASE = XLSTMConfig(vocab_size=24, embedding_dim=16, num_heads=2, num_blocks=2)
TOKENS = jnp.zeros((3, 5), jnp.int32)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("conv_kernel_size", 0, "at least 1"),
        ("qkv_block_size", 0, "at least 1"),
        ("qkv_block_size", -4, "at least 1"),
        ("ffn_round_up", 0, "at least 1"),
        ("ffn_dim", 0, "at least 1, or None"),
        ("norm_eps", -1e-6, "positive"),
        ("norm_eps", 0.0, "positive"),
        ("qk_dim_factor", -1.0, "positive"),
        ("v_dim_factor", 0.0, "positive"),
        ("ffn_proj_factor", 0.0, "positive"),
        ("up_proj_factor", 0.0, "positive"),
        ("slstm_ffn_factor", 0.0, "positive"),
        ("cell_eps", -1e-6, "at least 0"),
    ],
)
@pytest.mark.parametrize("kinds", ["mlstm", "xLSTM[1:1]"])
def test_a_size_that_no_model_can_have_is_refused_by_its_name(kinds, name, value, rule):
    with pytest.raises(ConfigError, match=f"{name} is {value}, but must be {rule}"):
        dataclasses.replace(BASE, block_kinds=kinds, **{name: value})


@pytest.mark.parametrize(("factor", "size"), [("qk_dim_factor", "qk_dim"), ("v_dim_factor", "v_dim")])
def test_a_factor_that_leaves_no_feature_is_refused(factor, size):
    with pytest.raises(ConfigError, match=f"{size} 0 leaves nothing for num_heads 2: change embedding_dim"):
        dataclasses.replace(BASE, **{factor: 0.001})


@pytest.mark.parametrize(
    ("kinds", "changes", "rule"),
    [
        (
            "mlstm_up",
            {"qk_norm": True},
            "qk_norm is True, but has no effect in blocks of kind mlstm_up, only in",
        ),
        ("mlstm_up", {"gate_soft_cap": None}, "only in those of kind mlstm: leave it out"),
        ("mlstm_up", {"input_gate_bias_init": -1.0}, "only in those of kind mlstm: leave it out"),
        ("mlstm_up", {"qk_dim_factor": 1.0}, "only in those of kind mlstm: leave it out"),
        ("mlstm_up", {"ffn_dim": 64}, "only in those of kind attention and mlstm: leave it out"),
        ("mlstm_up", {"slstm_backend": "reference"}, "only in those of kind slstm: leave it out"),
        ("slstm", {"chunk_size": 8}, "only in those of kind mlstm and mlstm_up: leave it out"),
        ("slstm", {"input_gate": "sigmoid"}, "only in those of kind mlstm and mlstm_up: leave it out"),
        ("mlstm", {"conv_kernel_size": 3}, "only in those of kind mlstm_up and slstm: leave it out"),
        ("xLSTM[1:1]", {"v_dim_factor": 0.5}, "in blocks of kind mlstm_up, slstm, only in those of kind mlstm:"),
        ("mlstm", {"ffn_dim": 64, "ffn_round_up": 32}, "ffn_round_up is 32, but has no effect beside ffn_dim"),
        ("mlstm", {"mlstm_backend": "parallel", "chunk_size": 8}, "no effect with mlstm_backend 'parallel'"),
    ],
)
def test_a_field_that_no_block_reads_is_refused_by_its_name(kinds, changes, rule):
    with pytest.raises(ConfigError, match=re.escape(rule)):
        dataclasses.replace(BASE, block_kinds=kinds, **changes)


def test_a_field_that_one_of_several_kinds_reads_can_be_set():
    kinds = ("mlstm", "mlstm_up")
    assert dataclasses.replace(BASE, block_kinds=kinds, qk_norm=True, conv_kernel_size=3).qk_norm


@pytest.mark.parametrize(("field", "value"), [("ffn_multiple_of", 3), ("ffn_dim_multiplier", 3.0)])
def test_what_would_compute_a_width_that_is_given_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"{field} is {value}, but has no effect beside ffn_dim: leave it out"):
        LlamaConfig(vocab_size=24, embedding_dim=16, num_blocks=1, head_dim=8, ffn_dim=32, **{field: value})


def test_dropout_of_embeddings_without_a_rate_is_refused():
    with pytest.raises(ConfigError, match="embedding_dropout does nothing with dropout_rate 0: set a rate"):
        dataclasses.replace(BASE, embedding_dropout=True)
    assert dataclasses.replace(BASE, embedding_dropout=True, dropout_rate=0.1).embedding_dropout


def test_scales_of_a_norm_that_is_off_are_refused():
    with pytest.raises(ConfigError, match="qk_norm_scale does nothing without qk_norm: set qk_norm too"):
        dataclasses.replace(BASE, qk_norm_scale=True)


@pytest.mark.parametrize("size", [-1, 2])
def test_a_pipeline_axis_that_models_would_ignore_is_refused(size):
    parallel = ParallelConfig(data_axis_size=1, pipeline_axis_size=size)
    with pytest.raises(ConfigError, match=rf"pipeline_axis_size is {size}, but must be 1.*fsdp"):
        dataclasses.replace(BASE, parallel=parallel)
    with pytest.raises(ConfigError, match="no pipeline stages"):
        LlamaConfig(vocab_size=24, embedding_dim=16, num_blocks=1, head_dim=8, parallel=parallel)
    check_parallel(ParallelConfig(data_axis_size=2, fsdp_axis_size=-1, model_axis_size=2))


@pytest.mark.parametrize("config_class", [XLSTMConfig, LlamaConfig])
def test_settings_that_are_no_numbers_are_refused_by_their_names(config_class, unchecked_shapes):
    fields = {"vocab_size": 24, "embedding_dim": 128, "num_blocks": 2, "num_heads": 2}
    if config_class is LlamaConfig:
        del fields["num_heads"]
    for name, value in {"vocab_size": "24", "embedding_dim": 16.5, "norm_eps": math.nan, "dtype": None}.items():
        with pytest.raises(ConfigError, match=f"{name} is {value!r}, but must"):
            config_class(**{**fields, name: value})


@pytest.mark.parametrize("shape", [(5,), (1, 3, 5), (0, 5), (3, 0)])
def test_tokens_that_are_not_rows_of_tokens_are_refused(shape):
    with pytest.raises(ValueError, match=r"tokens has shape \(.*\), but must be \[batch, length\] with at least one"):
        check_tokens(jnp.zeros(shape, jnp.int32))


@pytest.mark.parametrize("shape", [(3, 4), (5,), (1, 5), (3, 5, 1)])
def test_an_array_of_another_shape_than_the_tokens_is_refused_by_its_name(shape):
    with pytest.raises(
        ValueError, match=r"targets has shape \(.*\), but tokens has shape \(3, 5\): they must be the same"
    ):
        check_tokens(TOKENS, pos_idx=TOKENS, document_borders=None, targets=jnp.zeros(shape, jnp.int32))
    check_tokens(TOKENS, pos_idx=TOKENS, document_borders=None, targets=TOKENS)


@pytest.mark.parametrize("name", ["tokens", "targets"])
def test_tokens_that_are_no_integers_are_refused(name):
    arrays = {"tokens": TOKENS, name: TOKENS.astype(jnp.float32)}
    with pytest.raises(ValueError, match=f"{name} has dtype float32, but must hold integers"):
        check_tokens(**arrays)
