"""Write the golden files: what the public implementations compute for tiny models with fixed parameters.

Needs Python 3.11 and, installed in this order so that no package brings another torch with it:

    pip install torch==2.13.0                                      # a build for the CPU
    pip install transformers==5.22.2 numpy einops omegaconf dacite
    pip install --no-deps xlstm==2.0.6 mlstm-kernels==2.0.6        # `xlstm` imports the kernels; none of them is used

Run it with the folder to write to; without one, the files beside this script are replaced:

    python tests/golden/make_golden.py [FOLDER]

`peers.py` beside it builds the models, `README.md` says what the files hold. Everything is float32 on one thread of the
CPU. Every parameter is random, also those that start as zero or one, so that no term of a model is left out.
"""

import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from peers import (
    BATCH,
    Tensors,
    cells_of,
    draw_tokens,
    empty_hf_cache,
    gradients,
    grid,
    hf_llama,
    hf_xlstm,
    paper_steps,
    paper_xlstm,
    parameters_of,
    randomise,
    slstm_arguments,
    slstm_cell,
    slstm_states,
)

PACKAGES = ("torch", "transformers", "xlstm", "mlstm-kernels", "numpy")


def rounded(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Round to 16 significant bits, that is, by 1.5e-5 at most.

    Gradients are the larger part of the files, and their last bits are noise.
    """
    result = {}
    for name, value in tensors.items():
        bits = value.numpy().view(np.uint32)
        result[name] = torch.tensor(((bits + 0x7F + (bits >> 8 & 1)) & np.uint32(0xFFFFFF00)).view(np.float32))
    return result


def save(path: Path, *, config: Mapping, **groups: Mapping[str, torch.Tensor] | torch.Tensor) -> None:
    """Write arrays, and groups of arrays under the prefix of the group, beside the config and the versions as JSON."""
    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    arrays = {"config": np.array(json.dumps(config, sort_keys=True)), "versions": np.array(json.dumps(versions))}
    for group, value in groups.items():
        members = {f"{group}/{name}": x for name, x in value.items()} if isinstance(value, Mapping) else {group: value}
        arrays |= {name: x.detach().numpy() for name, x in members.items()}
    assert all(np.all(np.isfinite(array)) for array in arrays.values() if array.dtype.kind == "f"), path
    np.savez_compressed(path, allow_pickle=False, **arrays)


def write_hf_xlstm(path: Path) -> None:
    """Run the 7B-style xLSTM of transformers."""
    model = hf_xlstm()
    generator = np.random.default_rng(1)
    randomise(model, generator, norm_centre=1.0)
    parameters = parameters_of(model)
    tokens = draw_tokens(generator, model.config.vocab_size, 24)
    projection = grid(generator, (BATCH, 13, model.config.vocab_size), 1.0)

    model.train()
    grad = gradients(model(tokens[:, :13], use_cache=False).logits, projection, parameters)

    model.eval()
    with torch.no_grad():
        logits = {str(n): model(tokens[:, :n], use_cache=False).logits for n in (1, 7, 8, 13, 24)}
        cache = empty_hf_cache(model)
        model(tokens[:, :13], cache_params=cache, use_cache=True)
        middle = cells_of(cache)
        logits["13_to_18"] = model(tokens[:, 13:18], cache_params=cache, use_cache=True).logits
        last = cells_of(cache)

    save(
        path,
        config=model.config.to_dict(),
        tokens=tokens,
        projection=projection,
        param=parameters,
        grad=rounded(grad),
        logits=logits,
        state_13=middle,
        state_18=last,
    )


def write_paper_xlstm(path: Path, *, seed: int, num_blocks: int, slstm_at: list[int], num_heads: int) -> None:
    """Run the paper's blocks of the package `xlstm` as a language model."""
    model = paper_xlstm(num_blocks=num_blocks, slstm_at=slstm_at, num_heads=num_heads)
    config, generator = model.config, np.random.default_rng(seed)
    randomise(model, generator, norm_centre=0.0)
    parameters = parameters_of(model)
    tokens = draw_tokens(generator, config.vocab_size, config.context_length)
    projection = grid(generator, (BATCH, 11, config.vocab_size), 1.0)

    grad = gradients(model(tokens[:, :11]), projection, parameters)

    with torch.no_grad():
        logits = {str(n): model(tokens[:, :n]) for n in (11, 16)}
        logits["steps"], state = paper_steps(model, tokens)

    save(
        path,
        config=dataclasses.asdict(config),
        tokens=tokens,
        projection=projection,
        param=parameters,
        grad=rounded(grad),
        logits=logits,
        state_16=flat(state),
    )


def flat(tree: Mapping | tuple | torch.Tensor, prefix: str = "") -> Tensors:
    """Name the leaves of nested mappings and tuples by their paths."""
    if isinstance(tree, torch.Tensor):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {name: leaf for key, child in items for name, leaf in flat(child, f"{prefix}/{key}".lstrip("/")).items()}


def write_slstm_cell(path: Path) -> None:
    """Run the sLSTM cell of the package `xlstm` alone: from a state that is not empty, and from the empty one."""
    cell = slstm_cell()
    generator = np.random.default_rng(5)
    randomise(cell, generator, norm_centre=0.0)
    parameters = parameters_of(cell)
    arguments = slstm_arguments(cell, generator, length=9)
    inputs, projection, initial_state = (arguments[name] for name in ("input", "projection", "initial_state"))

    output, _ = cell(inputs, initial_state)
    grad = gradients(output, projection, {**parameters, "input": inputs, "initial_state": initial_state})
    output_from_zero, _ = cell(inputs)
    grad_from_zero = gradients(output_from_zero, projection, {**parameters, "input": inputs})

    save(
        path,
        config=dataclasses.asdict(cell.config),
        **arguments,
        param=parameters,
        output=output,
        states=slstm_states(cell, inputs, initial_state),
        grad=rounded(grad),
        output_from_zero=output_from_zero,
        states_from_zero=slstm_states(cell, inputs, torch.zeros_like(initial_state)),
        grad_from_zero=rounded(grad_from_zero),
    )


def write_hf_llama(path: Path) -> None:
    """Run the Llama of transformers."""
    model = hf_llama()
    generator = np.random.default_rng(6)
    randomise(model, generator, norm_centre=1.0)
    parameters = parameters_of(model)
    tokens = draw_tokens(generator, model.config.vocab_size, 19)
    projection = grid(generator, (BATCH, 11, model.config.vocab_size), 1.0)

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
        config=model.config.to_dict(),
        tokens=tokens,
        projection=projection,
        param=parameters,
        grad=rounded(grad),
        logits=logits,
        state_11=state,
    )


FILES: dict[str, Callable[[Path], None]] = {
    "hf_xlstm": write_hf_xlstm,
    "xlstm_mlstm_block": lambda path: write_paper_xlstm(path, seed=2, num_blocks=1, slstm_at=[], num_heads=4),
    "xlstm_slstm_block": lambda path: write_paper_xlstm(path, seed=3, num_blocks=1, slstm_at=[0], num_heads=2),
    "xlstm_mixed": lambda path: write_paper_xlstm(path, seed=4, num_blocks=3, slstm_at=[1], num_heads=2),
    "slstm_cell": write_slstm_cell,
    "hf_llama": write_hf_llama,
}


def main() -> None:
    """Write all files into the folder on the command line."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, write in FILES.items():
        write(folder / f"{name}.npz")


if __name__ == "__main__":
    main()
