"""Conversion of the Llama of Hugging Face `transformers`."""

from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.conversion.huggingface import check_config
from xlstm_jax.conversion.rules import COPY, LINEAR, Rule, Transform, lm_head, rename
from xlstm_jax.models.llama.config import LlamaConfig

ATTENTION = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def config_from_huggingface(config: dict[str, Any], **changes: Any) -> LlamaConfig:
    """Convert the `config.json` of a Hugging Face Llama to our config.

    Args:
        config: The fields of the file.
        **changes: Fields of our config to set, such as `dtype` or `max_state_length`.

    Returns:
        The config.
    """
    check_config(config, "llama", _SIZES)
    # Before transformers 5, the base and the scaling of the rotary embedding were two separate fields.
    rotary = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    needed = {
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "rope_type": (rotary.get("rope_type", rotary.get("type", "default")), "default"),
        "mlp_bias": (config.get("mlp_bias", False), config.get("attention_bias", False)),
        "head_dim * num_attention_heads": (head_dim * config["num_attention_heads"], config["hidden_size"]),
    }
    for name, (given, possible) in needed.items():
        if given != possible:
            raise ConfigError(
                f"{name} is {given!r}, but our Llama with the other fields of this config has {possible!r}."
            )
    fields = {
        "vocab_size": config["vocab_size"],
        "embedding_dim": config["hidden_size"],
        "num_blocks": config["num_hidden_layers"],
        "head_dim": head_dim,
        "num_kv_heads": config.get("num_key_value_heads"),
        "theta": rotary.get("rope_theta", 10000.0),
        "ffn_dim": config["intermediate_size"],
        "use_bias": config.get("attention_bias", False),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_weights": config.get("tie_word_embeddings", False),
    }
    return LlamaConfig(**(fields | changes))


def huggingface_rules(config: LlamaConfig) -> list[Rule]:
    """Return the rules for the state dict of `LlamaForCausalLM`."""
    if config.qk_norm:
        raise ConfigError("qk_norm is True, but the Llama of Hugging Face has no norms of queries and keys.")
    theirs, ours = "model.layers.{i}.", "block_stack.block_{i}."
    pairs = neighbouring_pairs(config.head_dim)
    turned = Transform(lambda x: [pairs.to_ours(x)[0].T], lambda xs: pairs.to_theirs([xs[0].T]))
    layers = [(f"self_attn.{name}", f"attn.{own}", own in "qk") for own, name in ATTENTION.items()]
    layers += [(f"mlp.{name}", f"ffn.{own}", False) for own, name in FEED_FORWARD.items()]
    block = [
        rename(theirs + "input_layernorm.weight", ours + "attn.pre_norm.scale"),
        rename(theirs + "post_attention_layernorm.weight", ours + "ffn.pre_norm.scale"),
    ]
    for name, own, turns in layers:
        block.append(rename(f"{theirs}{name}.weight", f"{ours}{own}.kernel", turned if turns else LINEAR))
        if config.use_bias:
            block.append(rename(f"{theirs}{name}.bias", f"{ours}{own}.bias", pairs if turns else COPY))
    embedding = "model.embed_tokens.weight"
    return [
        rename(embedding, "token_embedding.embedding"),
        *(rule.at(index) for index in range(config.num_blocks) for rule in block),
        rename("model.norm.weight", "lm_head.out_norm.scale"),
        lm_head(embedding, config.tie_weights),
    ]


def neighbouring_pairs(head_dim: int) -> Transform:
    """Reorder the rows of each head: theirs rotates feature `i` with `i + head_dim / 2`, ours `2i` with `2i + 1`."""

    def swapped(x: Any, *shape: int) -> Any:
        return x.reshape(-1, *shape, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)

    return Transform(lambda x: [swapped(x, 2, head_dim // 2)], lambda xs: swapped(xs[0], head_dim // 2, 2))
