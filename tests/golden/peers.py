"""The public models that ours are compared with: tiny ones in torch, in float32, with fixed parameters.

Where the package `xlstm` is installed, transformers runs that package's blocks in place of its own, without a word.
Here that is a choice: `hf_xlstm` takes the blocks of transformers, or with `of_package=True` those of the package.
"""

import functools
import importlib
import math
import sys
from collections.abc import Mapping
from types import ModuleType

import numpy as np
import torch
import transformers
from xlstm import (
    FeedForwardConfig,
    mLSTMBlockConfig,
    mLSTMLayerConfig,
    sLSTMBlockConfig,
    sLSTMLayerConfig,
    xLSTMLMModel,
    xLSTMLMModelConfig,
)
from xlstm.blocks.slstm.cell import sLSTMCell, sLSTMCellConfig

torch.set_num_threads(1)  # sums in one order, whatever the machine

BATCH = 2

Tensors = dict[str, torch.Tensor]


def grid(generator: np.random.Generator, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Draw from 16 evenly spaced values within ±`scale`, a power of two: exact in bfloat16, and small when zipped."""
    return torch.tensor((generator.integers(-8, 8, shape) + 0.5) / 8 * scale, dtype=torch.float32)


def draw_tokens(generator: np.random.Generator, vocab_size: int, length: int) -> torch.Tensor:
    """Draw a batch of tokens."""
    return torch.tensor(generator.integers(0, vocab_size, (BATCH, length)), dtype=torch.int32)


def randomise(model: torch.nn.Module, generator: np.random.Generator, *, norm_centre: float) -> None:
    """Overwrite all parameters, so that activations, gates and logits are of the order of one."""
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        # The last axis of a matrix is the one that is summed over, in all of these models.
        scale = 2.0 ** round(math.log2(math.sqrt(3 / parameter.shape[-1]))) if parameter.ndim > 1 else 0.5
        if "embed" in name:
            scale = 1 / 16  # so small that the epsilon of the first norm shows
        elif "xlstm.v_proj" in name:
            scale /= 16  # for the norm behind the cell, likewise
        elif "gate" in name:
            scale *= 2
        elif "lm_head" in name:
            scale *= 4  # so large that a soft cap shows
        centre = 0.0
        if "norm" in name:
            centre = norm_centre
        elif "skip" in name:
            centre = 1.0
        elif "fgate" in name and name.endswith("bias"):
            centre = 2.0
        parameter.data = centre + grid(generator, tuple(parameter.shape), scale)


def parameters_of(model: torch.nn.Module) -> Tensors:
    """Return the parameters under their names, and check that the state dict holds nothing else but tied ones."""
    parameters, state_dict = dict(model.named_parameters()), model.state_dict()
    own = {tensor.data_ptr() for tensor in parameters.values()}
    assert parameters.keys() <= state_dict.keys()
    assert all(tensor.data_ptr() in own for tensor in state_dict.values())
    return parameters


def gradients(output: torch.Tensor, projection: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Tensors:
    """Differentiate the sum of `output * projection`."""
    values = torch.autograd.grad((output * projection).sum(), list(inputs.values()))
    return dict(zip(inputs, values, strict=True))


def hf_xlstm(*, of_package: bool = False, **changes: object) -> torch.nn.Module:
    """Build the 7B-style xLSTM of transformers."""
    module = _hf_xlstm_module(of_package)
    config = module.xLSTMConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 2,
            "chunk_size": 8,
            "ffn_proj_factor": 2.01,  # 64.32 is rounded to 64 here, to 128 by those who round up in full
            "norm_eps": 1e-3,  # shows in the result
        }
        | changes
    )
    return module.xLSTMForCausalLM(config)


@functools.cache
def _hf_xlstm_module(of_package: bool) -> ModuleType:
    """Load the xLSTM of transformers anew: it asks once, while it is loaded, whether the package is there."""
    transformers.utils.is_xlstm_available = lambda: of_package
    names = [f"transformers.models.xlstm.{part}_xlstm" for part in ("configuration", "modeling")]
    for name in names:
        sys.modules.pop(name, None)
    configuration, modeling = map(importlib.import_module, names)
    assert configuration.external_xlstm == modeling.external_xlstm == of_package
    return modeling


def empty_hf_cache(model: torch.nn.Module) -> object:
    """Make a cache of the layers' real sizes; as transformers makes it, they are rounded up to multiples of 64."""
    cache = _hf_xlstm_module(False).xLSTMCache(model.config, BATCH, dtype=torch.float32)
    heads = model.config.num_heads
    for index, block in enumerate(model.backbone.blocks):
        layer = block.mlstm_layer
        qk_dim, v_dim = layer.q.out_features // heads, layer.v.out_features // heads
        shapes = (BATCH, heads, qk_dim, v_dim), (BATCH, heads, qk_dim), (BATCH, heads, 1)
        cache.rnn_state[index] = tuple(torch.zeros(shape) for shape in shapes)
    return cache


def cells_of(cache: object) -> Tensors:
    """Copy the memory, normaliser and stabiliser of every layer; the cache is overwritten in place."""
    return {
        f"{layer}/{name}": value.clone()
        for layer, values in cache.rnn_state.items()
        for name, value in zip("Cnm", values, strict=True)
    }


class FrozenCells(dict):
    """The cells of a cache; what is written to them is lost, so that what was read can still be differentiated."""

    def __getitem__(self, layer):
        return tuple(value.clone() for value in super().__getitem__(layer))


def paper_xlstm(*, num_blocks: int, slstm_at: list[int], num_heads: int, **changes: object) -> xLSTMLMModel:
    """Build the paper's blocks of the package `xlstm` as a language model."""
    width = 32
    mlstm = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=num_heads))
    slstm = sLSTMBlockConfig(
        slstm=sLSTMLayerConfig(num_heads=num_heads, backend="vanilla"),
        feedforward=FeedForwardConfig(embedding_dim=width),
    )
    fields = {
        "vocab_size": 32,
        "embedding_dim": width,
        "context_length": 16,
        "num_blocks": num_blocks,
        "slstm_at": slstm_at,
        "mlstm_block": mlstm if len(slstm_at) < num_blocks else None,
        "slstm_block": slstm if slstm_at else None,
    }
    return xLSTMLMModel(xLSTMLMModelConfig(**(fields | changes)))


def paper_steps(model: xLSTMLMModel, tokens: torch.Tensor) -> tuple[torch.Tensor, object]:
    """Feed a model of the paper token by token, and return all logits and the last state."""
    state, steps = None, []
    for token in tokens.split(1, dim=1):
        step, state = model.step(token, state)
        steps.append(step)
    return torch.cat(steps, dim=1), state


def slstm_cell(hidden_size: int = 24, num_heads: int = 3) -> torch.nn.Module:
    """Build the sLSTM cell of the package `xlstm`."""
    return sLSTMCell(sLSTMCellConfig(hidden_size=hidden_size, num_heads=num_heads, backend="vanilla"))


def slstm_arguments(cell: torch.nn.Module, generator: np.random.Generator, length: int) -> Tensors:
    """Draw inputs of an sLSTM cell, a projection of its outputs, and a state that is not empty."""
    heads, width = cell.config.num_heads, cell.config.hidden_size
    inputs = grid(generator, (BATCH, length, 4 * width), 4.0).requires_grad_()
    projection = grid(generator, (BATCH, heads, length, cell.config.head_dim), 1.0)
    y, c, stabiliser = (grid(generator, (BATCH, width), scale) for scale in (0.5, 1.0, 1.0))
    n = 1.0 + grid(generator, (BATCH, width), 0.5)
    state = torch.stack([y, c, n, stabiliser]).requires_grad_()
    return {"input": inputs, "initial_state": state, "projection": projection}


def slstm_states(cell: torch.nn.Module, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Feed the cell token by token and stack the state after each one behind the first state."""
    states = [state]
    with torch.no_grad():
        for token in inputs.split(1, dim=1):
            states.append(cell(token, states[-1])[1])
    return torch.stack(states, dim=1)


def hf_llama(**changes: object) -> transformers.LlamaForCausalLM:
    """Build the Llama of transformers."""
    fields = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attn_implementation": "eager",
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(fields | changes)))
