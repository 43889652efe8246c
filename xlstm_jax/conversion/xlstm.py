"""Conversion of the xLSTM of Hugging Face `transformers`, and of the paper's models in the package `xlstm`."""

from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.conversion.huggingface import check_config, check_values, same_of
from xlstm_jax.conversion.rules import (
    BLOCK_DIAGONAL,
    COPY,
    DEPTHWISE,
    LINEAR,
    PLUS_ONE,
    TWO_LINEAR,
    Rule,
    Transform,
    lm_head,
    rename,
)
from xlstm_jax.models.xlstm.config import XLSTMConfig

_OF_HUGGINGFACE = {"use_bias": False, "qk_norm": False, "post_norm": False, "input_gate": "exp", "norm": "rmsnorm"}
"""Settings that are fixed in the Hugging Face model, by our names."""
_OF_PAPER = {
    "norm": "layernorm",
    "paper_norm": "layernorm",
    "post_norm": False,
    "up_gate_soft_cap": None,
    "logits_soft_cap": None,
}
"""Settings that are fixed in the paper's models, by our names."""
_HIDDEN_SIZE, _NUM_LAYERS = "hidden_size/embedding_dim", "num_hidden_layers/num_blocks"
"""Fields with two names; files of the package `xlstm` have only the second."""
_DEFAULTS = {
    "use_bias": False,
    "tie_word_embeddings": False,
    "norm_eps": 1e-6,
    "eps": 1e-6,
    "qk_dim_factor": 0.5,
    "v_dim_factor": 1.0,
    "ffn_proj_factor": 2.667,
    "ffn_round_up_to_multiple_of": 64,
    "gate_soft_cap": 15.0,
    "output_logit_soft_cap": 30.0,
    "chunk_size": 64,
}
"""Defaults of fields that a file may omit."""
_CONVERTED = {
    "weight_mode": "single",
    "add_out_norm": True,
    "add_qk_norm": False,
    "add_post_norm": False,
    "add_post_blocks_norm": True,
}
"""The only supported values of these fields; the last three occur in files of the published models."""


def config_from_huggingface(config: dict[str, Any], **changes: Any) -> XLSTMConfig:
    """Convert the `config.json` of a Hugging Face xLSTM to our config.

    Args:
        config: The fields of the file.
        **changes: Fields of our config to set, such as `dtype` or `parallel`.

    Returns:
        The config.
    """
    check_config(config, "xlstm", ("vocab_size", _HIDDEN_SIZE, _NUM_LAYERS, "num_heads"))
    config = _DEFAULTS | config
    check_values(config, _CONVERTED | {"cell_norm_eps": config["norm_eps"]})
    _refuse_sigmoid_gates(config)
    hidden = same_of(config, _HIDDEN_SIZE)
    multiple = config["ffn_round_up_to_multiple_of"]
    # As in `transformers`, the sum is a float: a width less than one above a multiple is rounded down.
    ffn_dim = int((hidden * config["ffn_proj_factor"] + multiple - 1) // multiple * multiple)
    fields = {
        "vocab_size": config["vocab_size"],
        "embedding_dim": hidden,
        "num_heads": config["num_heads"],
        "num_blocks": same_of(config, _NUM_LAYERS),
        "block_kinds": "mlstm",
        "use_bias": config["use_bias"],
        "tie_weights": config["tie_word_embeddings"],
        "norm_eps": config["norm_eps"],
        "cell_eps": config["eps"],
        "qk_dim_factor": config["qk_dim_factor"],
        "v_dim_factor": config["v_dim_factor"],
        "ffn_dim": ffn_dim,
        "gate_soft_cap": config["gate_soft_cap"],
        "logits_soft_cap": config["output_logit_soft_cap"],
        "chunk_size": config["chunk_size"],
    }
    return XLSTMConfig(**(fields | changes))


def _refuse_sigmoid_gates(config: dict[str, Any]) -> None:
    for name in ("chunkwise_kernel", "sequence_kernel", "step_kernel"):
        if "siging" in str(config.get(name)):
            raise ConfigError(
                f"{name} is {config[name]!r}, a kernel with sigmoid input gates, but models of Hugging Face have "
                "exponential ones: only such a model can be converted."
            )


def huggingface_rules(config: XLSTMConfig) -> list[Rule]:
    """Return the rules for the state dict of `xLSTMForCausalLM` without fused weights and without biases.

    A config with settings that their model does not support raises an error.
    """
    _refuse_what_they_lack(config, _OF_HUGGINGFACE, "the xLSTM of Hugging Face")
    if set(config.kinds) != {"mlstm"}:
        raise ConfigError(
            f"block_kinds is {config.block_kinds!r}, but the xLSTM of Hugging Face has only blocks 'mlstm': take "
            "paper_rules for those of the paper."
        )
    theirs, ours = "backbone.blocks.{i}.", "block_stack.block_{i}."
    block = [
        rename(theirs + "norm_mlstm.weight", ours + "norm_mlstm.scale"),
        *(
            rename(f"{theirs}mlstm_layer.{name}.weight", f"{ours}mlstm.{own}.kernel", LINEAR)
            for name, own in (
                ("q", "q"),
                ("k", "k"),
                ("v", "v"),
                ("ogate_preact", "ogate"),
                ("igate_preact", "igate"),
                ("fgate_preact", "fgate"),
                ("out_proj", "out"),
            )
        ),
        *(rename(f"{theirs}mlstm_layer.{g}_preact.bias", f"{ours}mlstm.{g}.bias") for g in ("igate", "fgate")),
        rename(theirs + "mlstm_layer.multihead_norm.weight", ours + "mlstm.multihead_norm.scale"),
        rename(theirs + "norm_ffn.weight", ours + "norm_ffn.scale"),
        rename(theirs + "ffn.proj_up_gate.weight", ours + "ffn.gate.kernel", LINEAR),
        rename(theirs + "ffn.proj_up.weight", ours + "ffn.up.kernel", LINEAR),
        rename(theirs + "ffn.proj_down.weight", ours + "ffn.down.kernel", LINEAR),
    ]
    return [
        rename("backbone.embeddings.weight", "token_embedding.embedding"),
        *(rule.at(index) for index in range(config.num_blocks) for rule in block),
        rename("backbone.out_norm.weight", "lm_head.out_norm.scale"),
        lm_head("backbone.embeddings.weight", config.tie_weights),
    ]


def _refuse_what_they_lack(config: XLSTMConfig, fixed: dict[str, Any], model: str) -> None:
    for name, possible in fixed.items():
        if getattr(config, name) != possible:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but {model}, as it is converted here, has {possible!r}: only "
                "such a model can be converted."
            )


def config_from_paper(config: dict[str, Any], **changes: Any) -> XLSTMConfig:
    """Convert the config of the package's `xLSTMLMModel` to ours.

    Args:
        config: The fields of their config, with `_block_map` as the package completes it.
        **changes: Fields of our config to set.

    Returns:
        The config.
    """
    kinds = [("mlstm_up", "slstm")[int(kind)] for kind in str(config["_block_map"]).split(",")]
    mlstm = (config.get("mlstm_block") or {}).get("mlstm", {})
    slstm_block = config.get("slstm_block") or {}
    slstm, feed_forward = slstm_block.get("slstm", {}), slstm_block.get("feedforward", {})
    layers = {kind: layer for kind, layer in (("mlstm_up", mlstm), ("slstm", slstm)) if kind in kinds}
    fields = {
        "vocab_size": config["vocab_size"],
        "embedding_dim": config["embedding_dim"],
        "num_heads": _shared_field(layers, "num_heads"),
        "num_blocks": len(kinds),
        "block_kinds": kinds,
        "tie_weights": config["tie_weights"],
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "logits_soft_cap": None,
        "conv_kernel_size": _shared_field(layers, "conv1d_kernel_size"),
    }
    if "mlstm_up" in kinds:
        fields["up_proj_factor"] = mlstm.get("proj_factor", 2.0)
        fields["qkv_block_size"] = mlstm.get("qkv_proj_blocksize", 4)
    if "slstm" in kinds:
        fields["slstm_ffn_factor"] = feed_forward.get("proj_factor", 1.3)
    return XLSTMConfig(**(fields | changes))


def _shared_field(layers: dict[str, dict[str, Any]], name: str) -> int:
    """Return the value of a field that must be the same in the layers of all kinds of blocks."""
    values = {kind: layer[name] for kind, layer in layers.items()}
    if len(set(values.values())) > 1:
        found = " and ".join(f"{value} in {kind}" for kind, value in values.items())
        raise ConfigError(f"{name} is {found} blocks, but those of our model have the same: it cannot be converted.")
    return next(iter(values.values()))


def paper_rules(config: XLSTMConfig) -> list[Rule]:
    """Return the rules for the state dict of `xLSTMLMModel` with the vanilla sLSTM cell.

    A config with settings that their model does not support raises an error.
    """
    _refuse_what_they_lack(config, _OF_PAPER, "the xLSTM of the paper")
    rules_of = {"mlstm_up": _paper_mlstm_rules, "slstm": _paper_slstm_rules}
    if not set(config.kinds) <= set(rules_of):
        raise ConfigError(
            f"block_kinds is {config.block_kinds!r}, but the xLSTM of the paper has only blocks 'mlstm_up' and 'slstm'."
        )
    blocks = [rule.at(index) for index, kind in enumerate(config.kinds) for rule in rules_of[kind](config)]
    return [
        rename("token_embedding.weight", "token_embedding.embedding"),
        *blocks,
        rename("xlstm_block_stack.post_blocks_norm.weight", "lm_head.out_norm.scale", PLUS_ONE),
        lm_head("token_embedding.weight", config.tie_weights),
    ]


_THEIRS, _OURS = "xlstm_block_stack.blocks.{i}.", "block_stack.block_{i}."


def _paper_mlstm_rules(config: XLSTMConfig) -> list[Rule]:
    theirs, ours = _THEIRS + "xlstm.", _OURS + "mlstm."
    gate = Transform(
        lambda x: [x.reshape(x.shape[0], 3, -1).transpose(1, 2, 0)],
        lambda xs: xs[0].transpose(2, 0, 1).reshape(config.num_heads, -1),
    )
    return [
        rename(_THEIRS + "xlstm_norm.weight", _OURS + "norm_mlstm.scale", PLUS_ONE),
        Rule(theirs + "proj_up.weight", (ours + "up.kernel", ours + "gate.kernel"), TWO_LINEAR),
        *(rename(f"{theirs}{name}_proj.weight", f"{ours}{name}.kernel", BLOCK_DIAGONAL) for name in "qkv"),
        *_conv_rules(theirs, ours),
        *(rename(f"{theirs}mlstm_cell.{g}.weight", f"{ours}{g}.kernel", gate) for g in ("igate", "fgate")),
        *(rename(f"{theirs}mlstm_cell.{g}.bias", f"{ours}{g}.bias") for g in ("igate", "fgate")),
        rename(theirs + "mlstm_cell.outnorm.weight", ours + "multihead_norm.scale", PLUS_ONE),
        rename(theirs + "learnable_skip", ours + "skip"),
        rename(theirs + "proj_down.weight", ours + "down.kernel", LINEAR),
    ]


def _paper_slstm_rules(config: XLSTMConfig) -> list[Rule]:
    theirs, ours, num_heads = _THEIRS + "xlstm.", _OURS + "slstm.", config.num_heads
    recurrent = Transform(
        lambda x: [x.reshape(num_heads, 4, -1, x.shape[-1]).transpose(0, 3, 1, 2)],
        lambda xs: xs[0].transpose(0, 2, 3, 1).reshape(num_heads, -1, xs[0].shape[1]),
    )
    bias = Transform(
        lambda x: [x.reshape(4, num_heads, -1).swapaxes(0, 1)], lambda xs: xs[0].swapaxes(0, 1).reshape(-1)
    )
    # In their code, the names of forget gate and input gate are swapped.
    gates = (("fgate", "igate"), ("igate", "fgate"), ("zgate", "zgate"), ("ogate", "ogate"))
    return [
        rename(_THEIRS + "xlstm_norm.weight", _OURS + "norm_slstm.scale", PLUS_ONE),
        *_conv_rules(theirs, ours),
        *(rename(f"{theirs}{name}.weight", f"{ours}{own}.kernel", BLOCK_DIAGONAL) for name, own in gates),
        rename(theirs + "slstm_cell._recurrent_kernel_", ours + "recurrent_kernel", recurrent),
        rename(theirs + "slstm_cell._bias_", ours + "bias", bias),
        rename(theirs + "group_norm.weight", ours + "multihead_norm.scale", PLUS_ONE),
        rename(_THEIRS + "ffn_norm.weight", _OURS + "norm_ffn.scale", PLUS_ONE),
        Rule(_THEIRS + "ffn.proj_up.weight", (_OURS + "ffn.gate.kernel", _OURS + "ffn.up.kernel"), TWO_LINEAR),
        rename(_THEIRS + "ffn.proj_down.weight", _OURS + "ffn.down.kernel", LINEAR),
    ]


def _conv_rules(theirs: str, ours: str) -> list[Rule]:
    return [
        rename(theirs + "conv1d.conv.weight", ours + "conv.kernel", DEPTHWISE),
        rename(theirs + "conv1d.conv.bias", ours + "conv.bias", COPY),
    ]
