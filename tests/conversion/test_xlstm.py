"""What the models that xLSTMs are converted to and from do not have is refused."""

import re

import jax
import numpy as np
import pytest
from conversion.loading import shapes_of, state_dict_of

from xlstm_jax.configs import ConfigError
from xlstm_jax.conversion.rules import to_theirs
from xlstm_jax.conversion.xlstm import config_from_paper, huggingface_rules, paper_rules
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig


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
    model = XLSTM(config(block_kinds=kinds, norm="layernorm", use_bias=True))
    with pytest.raises(ConfigError, match=r"0 are missing \(\), \d+ have no rule \(block_stack.*bias"):
        state_dict_of(model, paper_rules(model.config), zeros_for(model))


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
