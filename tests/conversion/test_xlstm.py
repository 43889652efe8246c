"""What the models that xLSTMs are converted to and from do not have is refused."""

import re

import jax
import numpy as np
import pytest
from conversion.loading import shapes_of, state_dict_of

from xlstm_jax.configs import ConfigError
from xlstm_jax.conversion.rules import to_theirs
from xlstm_jax.conversion.xlstm import config_from_huggingface, config_from_paper, huggingface_rules, paper_rules
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig

THEIRS = {"vocab_size": 16, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2}


def config(**changes):
    return XLSTMConfig(vocab_size=16, embedding_dim=8, num_heads=2, num_blocks=2, **changes)


def paper(block_map, mlstm=None, slstm=None):
    layer = {"num_heads": 2, "conv1d_kernel_size": 3}
    return {
        "vocab_size": 16,
        "embedding_dim": 64,
        "tie_weights": False,
        "_block_map": block_map,
        "mlstm_block": {"mlstm": layer | (mlstm or {})},
        "slstm_block": {"slstm": layer | (slstm or {})},
    }


def zeros_for(model):
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes_of(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_bias", True),
        ("qk_norm", True),
        ("post_norm", True),
        ("input_gate", "sigmoid"),
        ("norm", "layernorm"),
        ("block_kinds", "mlstm_up"),
        ("block_kinds", ["mlstm", "slstm"]),
    ],
)
def test_what_the_model_of_hugging_face_lacks_is_refused_by_its_name(name, value):
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}, but the xLSTM of Hugging Face")):
        huggingface_rules(config(**{name: value}))


@pytest.mark.parametrize("kinds", ["mlstm_up", "xLSTM[1:1]"])
def test_a_parameter_without_a_rule_is_not_left_out(kinds):
    model = XLSTM(config(block_kinds=kinds, norm="layernorm", logits_soft_cap=None, use_bias=True))
    with pytest.raises(ConfigError, match=r"0 are missing \(\), \d+ have no rule \(block_stack.*bias"):
        state_dict_of(model, paper_rules(model.config), zeros_for(model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("norm", "rmsnorm"),
        ("paper_norm", "rmsnorm"),
        ("post_norm", True),
        ("up_gate_soft_cap", 15.0),
        ("logits_soft_cap", 30.0),
        ("block_kinds", ["mlstm_up", "attention"]),
    ],
)
def test_what_the_model_of_the_paper_lacks_is_refused_by_its_name(name, value):
    own = config(**{"block_kinds": "mlstm_up", "norm": "layernorm", "logits_soft_cap": None, name: value})
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value!r}, but the xLSTM of the paper")):
        paper_rules(own)


def test_a_rule_without_its_parameter_is_named():
    rules = huggingface_rules(config())
    with pytest.raises(
        ConfigError, match=r"are missing \(block_stack.block_0.ffn.down.kernel, .*\), 1 have no rule \(x\)"
    ):
        to_theirs({"x": np.zeros(3)}, rules)


@pytest.mark.parametrize("name", ["num_heads", "conv1d_kernel_size"])
def test_a_model_of_the_paper_whose_layers_differ_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 4 in mlstm_up and 2 in slstm blocks"):
        config_from_paper(paper("0,1", mlstm={name: 4}, slstm={name: 2}))


@pytest.mark.parametrize(("block_map", "expected"), [("0,0", (4, 5)), ("1,1", (2, 3))])
def test_layers_that_no_block_has_do_not_matter(block_map, expected):
    found = config_from_paper(paper(block_map, mlstm={"num_heads": 4, "conv1d_kernel_size": 5}))
    assert (found.num_heads, found.conv_kernel_size) == expected


def test_fields_that_a_file_of_hugging_face_lacks_have_their_defaults():
    transformers = pytest.importorskip("transformers")
    complete = transformers.xLSTMConfig(**THEIRS).to_dict()
    assert config_from_huggingface(THEIRS) == config_from_huggingface(complete)


@pytest.mark.parametrize(("ours", "theirs"), [("embedding_dim", "hidden_size"), ("num_blocks", "num_hidden_layers")])
def test_a_size_has_two_names_that_must_agree(ours, theirs):
    renamed = {ours if name == theirs else name: value for name, value in THEIRS.items()}
    assert config_from_huggingface(renamed) == config_from_huggingface(THEIRS)
    both = rf"{theirs} {THEIRS[theirs]} and {ours} 6, which are names for the same number"
    with pytest.raises(ConfigError, match=both):
        config_from_huggingface(THEIRS | {ours: 6})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chunkwise_kernel": "chunkwise--triton_xl_chunk_siging"},
            "chunkwise_kernel is 'chunkwise--triton_xl_chunk_si",
        ),
        ({"step_kernel": "native_siging"}, "step_kernel is 'native_siging', a kernel with sigmoid input gates"),
        ({"weight_mode": "fused"}, "weight_mode is 'fused', but only models with 'single'"),
        ({"add_out_norm": False}, "add_out_norm is False"),
        ({"add_qk_norm": True}, "add_qk_norm is True"),
        ({"add_post_norm": True}, "add_post_norm is True"),
        ({"cell_norm_eps": 1e-5}, "cell_norm_eps is 1e-05, but only models with 1e-06"),
        ({"model_type": "llama"}, "model_type is 'llama', but must be 'xlstm'"),
        ({"num_heads": None}, "The config has no num_heads"),
        ({"hidden_size": None, "vocab_size": None}, "The config has no vocab_size, hidden_size/embedding_dim"),
    ],
)
def test_a_config_of_hugging_face_that_cannot_be_converted_is_refused_by_its_field(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_huggingface(THEIRS | changes)
