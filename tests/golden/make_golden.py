"""Write the golden files: what the public implementations compute for tiny models with fixed parameters.

Needs Python 3.11 and, installed in this order so that no package brings another torch with it:

    pip install torch==2.13.0                                      # a build for the CPU
    pip install transformers==5.22.2 numpy einops omegaconf dacite
    pip install --no-deps xlstm==2.0.6 mlstm-kernels==2.0.6        # `xlstm` imports the kernels; none of them is used

Run it with the folder to write to; without one, the files beside this script are replaced:

    python tests/golden/make_golden.py [FOLDER]

`README.md` beside it says what the files hold. Everything is float32 on one thread of the CPU. Every parameter is
random, also those that start as zero or one, so that no term of a model is left out.
"""

import dataclasses
import importlib.metadata
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

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

# Where `xlstm` is installed, transformers runs its blocks; asked before it loads its xLSTM, it runs its own.
transformers.utils.is_xlstm_available = lambda: False

BATCH = 2
PACKAGES = ("torch", "transformers", "xlstm", "mlstm-kernels", "numpy")

Arrays = dict[str, np.ndarray]


def grid(generator: np.random.Generator, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Draw from 16 evenly spaced values within ±`scale`, a power of two: exact in bfloat16, and small when zipped."""
    return torch.tensor((generator.integers(-8, 8, shape) + 0.5) / 8 * scale, dtype=torch.float32)


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


def parameters_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters under their names, and check that the state dict holds nothing else."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == model.state_dict().keys()
    return parameters


def gradients(output: torch.Tensor, projection: torch.Tensor, inputs: Mapping[str, torch.Tensor]) -> Arrays:
    """Differentiate the sum of `output * projection` and round to 16 significant bits, that is, by 1.5e-5 at most.

    Gradients are the larger part of the files, and their last bits are noise.
    """
    result = {}
    values = torch.autograd.grad((output * projection).sum(), list(inputs.values()))
    for name, value in zip(inputs, values, strict=True):
        bits = value.numpy().view(np.uint32)
        result[name] = ((bits + 0x7F + (bits >> 8 & 1)) & np.uint32(0xFFFFFF00)).view(np.float32)
    return result


def prefixed(prefix: str, arrays: Mapping[str, torch.Tensor | np.ndarray]) -> Arrays:
    """Name the arrays `prefix/name`."""
    return {f"{prefix}/{name}": torch.as_tensor(array).detach().numpy() for name, array in arrays.items()}


def save(path: Path, *, config: Mapping, **groups: Mapping[str, torch.Tensor | np.ndarray] | torch.Tensor) -> None:
    """Write arrays, and groups of arrays under the prefix of the group, beside the config and the versions as JSON."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    arrays = {"config": np.array(json.dumps(config, sort_keys=True)), "versions": np.array(json.dumps(versions))}
    for name, value in groups.items():
        arrays |= prefixed(name, value) if isinstance(value, Mapping) else {name: value.detach().numpy()}
    assert all(np.all(np.isfinite(array)) for array in arrays.values() if array.dtype.kind == "f"), path
    np.savez_compressed(path, allow_pickle=False, **arrays)


def hf_xlstm(path: Path) -> None:
    """Run the 7B-style xLSTM of transformers."""
    config = transformers.xLSTMConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        chunk_size=8,
        ffn_proj_factor=2.01,  # 64.32 is rounded to 64 here, to 128 by those who round up in full
        norm_eps=1e-3,  # shows in the result
    )
    model = transformers.xLSTMForCausalLM(config)
    assert not transformers.models.xlstm.configuration_xlstm.external_xlstm
    generator = np.random.default_rng(1)
    randomise(model, generator, norm_centre=1.0)
    parameters = parameters_of(model)
    tokens = torch.tensor(generator.integers(0, config.vocab_size, (BATCH, 24)), dtype=torch.int32)
    projection = grid(generator, (BATCH, 13, config.vocab_size), 1.0)

    model.train()
    grad = gradients(model(tokens[:, :13], use_cache=False).logits, projection, parameters)

    model.eval()
    with torch.no_grad():
        logits = {str(n): model(tokens[:, :n], use_cache=False).logits for n in (1, 7, 8, 13, 24)}
        cache = empty_cache(model)
        model(tokens[:, :13], cache_params=cache, use_cache=True)
        middle = cells_of(cache)
        logits["13_to_18"] = model(tokens[:, 13:18], cache_params=cache, use_cache=True).logits
        last = cells_of(cache)

    save(
        path,
        config=config.to_dict(),
        tokens=tokens,
        projection=projection,
        param=parameters,
        grad=grad,
        logits=logits,
        state_13=middle,
        state_18=last,
    )


def empty_cache(model: transformers.PreTrainedModel) -> object:
    """Make a cache of the layers' real sizes; as transformers makes it, they are rounded up to multiples of 64."""
    cache = transformers.models.xlstm.modeling_xlstm.xLSTMCache(model.config, BATCH, dtype=torch.float32)
    heads = model.config.num_heads
    for index, block in enumerate(model.backbone.blocks):
        qk_dim, v_dim = block.mlstm_layer.qk_dim // heads, block.mlstm_layer.v_dim // heads
        shapes = (BATCH, heads, qk_dim, v_dim), (BATCH, heads, qk_dim), (BATCH, heads, 1)
        cache.rnn_state[index] = tuple(torch.zeros(shape) for shape in shapes)
    return cache


def cells_of(cache: object) -> dict[str, torch.Tensor]:
    """Copy the memory, normaliser and stabiliser of every layer; the cache is overwritten in place."""
    return {
        f"{layer}/{name}": value.clone()
        for layer, values in cache.rnn_state.items()
        for name, value in zip("Cnm", values, strict=True)
    }


def paper_model(path: Path, *, seed: int, num_blocks: int, slstm_at: list[int], num_heads: int) -> None:
    """Run the paper's blocks of the package `xlstm` as a language model."""
    width = 32
    mlstm = mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=num_heads))
    slstm = sLSTMBlockConfig(
        slstm=sLSTMLayerConfig(num_heads=num_heads, backend="vanilla"),
        feedforward=FeedForwardConfig(embedding_dim=width),
    )
    config = xLSTMLMModelConfig(
        vocab_size=32,
        embedding_dim=width,
        context_length=16,
        num_blocks=num_blocks,
        slstm_at=slstm_at,
        mlstm_block=mlstm if len(slstm_at) < num_blocks else None,
        slstm_block=slstm if slstm_at else None,
    )
    model = xLSTMLMModel(config)
    generator = np.random.default_rng(seed)
    randomise(model, generator, norm_centre=0.0)
    parameters = parameters_of(model)
    tokens = torch.tensor(generator.integers(0, config.vocab_size, (BATCH, config.context_length)), dtype=torch.int32)
    projection = grid(generator, (BATCH, 11, config.vocab_size), 1.0)

    grad = gradients(model(tokens[:, :11]), projection, parameters)

    with torch.no_grad():
        logits = {str(n): model(tokens[:, :n]) for n in (11, 16)}
        state, steps = None, []
        for token in tokens.split(1, dim=1):
            step, state = model.step(token, state)
            steps.append(step)
        logits["steps"] = torch.cat(steps, dim=1)

    save(
        path,
        config=dataclasses.asdict(config),
        tokens=tokens,
        projection=projection,
        param=parameters,
        grad=grad,
        logits=logits,
        state_16=flat(state),
    )


def flat(tree: Mapping | tuple | torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
    """Name the leaves of nested mappings and tuples by their paths."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {name: leaf for key, child in items for name, leaf in flat(child, f"{prefix}/{key}".lstrip("/")).items()}


def slstm_cell(path: Path) -> None:
    """Run the sLSTM cell of the package `xlstm` alone: from a state that is not empty, and from the empty one."""
    config = sLSTMCellConfig(hidden_size=24, num_heads=3, backend="vanilla")
    cell = sLSTMCell(config)
    generator = np.random.default_rng(5)
    randomise(cell, generator, norm_centre=0.0)
    parameters = parameters_of(cell)
    time, width = 9, config.hidden_size
    inputs = grid(generator, (BATCH, time, 4 * width), 4.0).requires_grad_()
    projection = grid(generator, (BATCH, config.num_heads, time, config.head_dim), 1.0)
    y, c, stabiliser = (grid(generator, (BATCH, width), scale) for scale in (0.5, 1.0, 1.0))
    n = 1.0 + grid(generator, (BATCH, width), 0.5)
    initial_state = torch.stack([y, c, n, stabiliser]).requires_grad_()

    output, _ = cell(inputs, initial_state)
    grad = gradients(output, projection, {**parameters, "input": inputs, "initial_state": initial_state})
    output_from_zero, _ = cell(inputs)
    grad_from_zero = gradients(output_from_zero, projection, {**parameters, "input": inputs})

    save(
        path,
        config=dataclasses.asdict(config),
        input=inputs,
        initial_state=initial_state,
        projection=projection,
        param=parameters,
        output=output,
        states=all_states(cell, inputs, initial_state),
        grad=grad,
        output_from_zero=output_from_zero,
        states_from_zero=all_states(cell, inputs, torch.zeros_like(initial_state)),
        grad_from_zero=grad_from_zero,
    )


def all_states(cell: torch.nn.Module, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Feed the cell token by token and stack the state after each one behind the first state."""
    states = [state]
    with torch.no_grad():
        for token in inputs.split(1, dim=1):
            states.append(cell(token, states[-1])[1])
    return torch.stack(states, dim=1)


def hf_llama(path: Path) -> None:
    """Run the Llama of transformers."""
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config)
    generator = np.random.default_rng(6)
    randomise(model, generator, norm_centre=1.0)
    parameters = parameters_of(model)
    tokens = torch.tensor(generator.integers(0, config.vocab_size, (BATCH, 19)), dtype=torch.int32)
    projection = grid(generator, (BATCH, 11, config.vocab_size), 1.0)

    model.train()
    grad = gradients(model(tokens[:, :11], use_cache=False).logits, projection, parameters)

    model.eval()
    with torch.no_grad():
        logits = {str(n): model(tokens[:, :n], use_cache=False).logits for n in (11, 19)}
        cache = model(tokens[:, :7], use_cache=True).past_key_values
        logits["7_to_11"] = model(tokens[:, 7:11], past_key_values=cache, use_cache=True).logits
    state = {
        f"{index}/{name}": getattr(layer, name)
        for index, layer in enumerate(cache.layers)
        for name in ("keys", "values")
    }

    save(
        path,
        config=config.to_dict(),
        tokens=tokens,
        projection=projection,
        param=parameters,
        grad=grad,
        logits=logits,
        state_11=state,
    )


FILES: dict[str, Callable[[Path], None]] = {
    "hf_xlstm": hf_xlstm,
    "xlstm_mlstm_block": lambda path: paper_model(path, seed=2, num_blocks=1, slstm_at=[], num_heads=4),
    "xlstm_slstm_block": lambda path: paper_model(path, seed=3, num_blocks=1, slstm_at=[0], num_heads=2),
    "xlstm_mixed": lambda path: paper_model(path, seed=4, num_blocks=3, slstm_at=[1], num_heads=2),
    "slstm_cell": slstm_cell,
    "hf_llama": hf_llama,
}


def main() -> None:
    """Write all files into the folder on the command line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    torch.set_num_threads(1)
    for name, write in FILES.items():
        write(folder / f"{name}.npz")


if __name__ == "__main__":
    main()
