"""How exact the gradients of the mLSTM are: ours, and those of the kernels of the package mlstm-kernels.

    pip install torch mlstm-kernels==2.0.6
    python benchmarks/gradients.py

Prints the error of the gradient of every input relative to the recurrence in float64, by norm, for four losses: on the
outputs, with input gates as they are and as the 7B starts with; on the outputs after a norm over each head; and on the
outputs and the last state. With a GPU, torch's kernels in Triton are among the peers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlstm_jax.kernels.mlstm import mlstm
from xlstm_jax.kernels.mlstm.api import Backend
from xlstm_jax.kernels.mlstm.arg_specs import ArgSpec

INPUTS = ("q", "k", "v", "igate", "fgate")
SPEC = ArgSpec(2, 256, 2, 64, 128, igate_mean=0.0, fgate_mean=4.0)
SMALL_INPUTS = ArgSpec(2, 256, 2, 64, 128, igate_mean=-10.0, fgate_mean=4.0)
CASES = {
    "outputs": (SPEC, False, False),
    "outputs, input gates around exp(-10)": (SMALL_INPUTS, False, False),
    "outputs after a norm": (SPEC, True, False),
    "outputs and last state": (SPEC, False, True),
}


def projections(spec: ArgSpec) -> list[np.ndarray]:
    """Draw what the outputs, the last memory and the last normaliser are multiplied with in the loss."""
    state = spec.state(jax.random.key(2))
    shapes = (spec.batch_size, spec.length, spec.num_heads, spec.v_dim), state.memory.shape, state.normalizer.shape
    return [np.asarray(jax.random.normal(jax.random.key(3 + i), shape, jnp.float32)) for i, shape in enumerate(shapes)]


def loss(parts: list, weights: list, sqrt: Callable, has_norm: bool, has_state: bool) -> Any:
    """Project the outputs `[..., v]`, after a norm if asked for, and the last state if asked for."""
    if has_norm:
        hidden = parts[0]
        parts = [hidden / sqrt((hidden * hidden).mean(-1)[..., None] + 1e-6), *parts[1:]]
    pairs = list(zip(parts, weights, strict=True))
    return sum((part * weight).sum() for part, weight in (pairs if has_state else pairs[:1]))


def our_gradients(dtype: str, case: tuple, *, backend: Backend) -> list[np.ndarray]:
    """Compute the gradients of our forms; inputs are float32 numbers, whatever the precision."""
    spec, has_norm, has_state = case
    with jax.enable_x64(True):
        gates = "float64" if dtype == "float64" else "float32"
        inputs = [
            jnp.asarray(np.asarray(x), gates if x.ndim == 3 else dtype) for x in spec.arguments(jax.random.key(0))
        ]
        weights = [jnp.asarray(x, gates) for x in projections(spec)]

        def value(*inputs: jax.Array) -> jax.Array:
            result: Any = mlstm(*inputs, return_state=True, backend=backend)
            hidden, state = result
            unit = jax.lax.stop_gradient(jnp.exp(state.stabilizer))
            parts = [hidden.astype(gates), state.memory * unit[..., None, None], state.normalizer * unit[..., None]]
            return loss(parts, weights, jnp.sqrt, has_norm, has_state)

        gradients = jax.jit(jax.grad(value, argnums=(0, 1, 2, 3, 4)))(*inputs)
        return [np.asarray(x, np.float64) for x in gradients]


def peer_gradients(kernel: Callable, case: tuple) -> list[np.ndarray]:
    """Compute the gradients of a kernel for torch, whose heads come before the positions."""
    import torch

    spec, has_norm, has_state = case
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(x: Any) -> Any:
        return torch.tensor(np.asarray(x, np.float32), device=device)

    inputs = [tensor(jnp.swapaxes(x, 1, 2)).requires_grad_() for x in spec.arguments(jax.random.key(0))]
    hidden, (memory, normalizer, stabilizer) = kernel(*inputs, return_last_states=True)
    unit = torch.exp(stabilizer).reshape(*memory.shape[:2])
    parts = [
        hidden.float().transpose(1, 2),
        memory.float() * unit[..., None, None],
        normalizer.float() * unit[..., None],
    ]
    loss(parts, list(map(tensor, projections(spec))), torch.sqrt, has_norm, has_state).backward()
    return [x.grad.transpose(1, 2).double().cpu().numpy() for x in inputs]


def peers() -> dict[str, Callable]:
    """Return the peer's kernels that can run here and return states."""
    try:
        from mlstm_kernels.torch import get_available_mlstm_kernels, get_mlstm_kernel
    except ImportError:
        print("torch or mlstm-kernels is not installed, so ours is alone.\n")
        return {}
    names = [name for name in get_available_mlstm_kernels() if name.startswith("chunkwise") and "siging" not in name]
    return {name: functools.partial(get_mlstm_kernel(name), chunk_size=64) for name in names}


def main() -> None:
    """Print a table of each case."""
    forms = {
        "ours, float32": functools.partial(our_gradients, "float32", backend="chunkwise"),
        "ours, bfloat16": functools.partial(our_gradients, "bfloat16", backend="chunkwise"),
        **{name: functools.partial(peer_gradients, kernel) for name, kernel in peers().items()},
    }
    for name, case in CASES.items():
        exact = our_gradients("float64", case, backend="reference")
        print(f"Loss on {name}:\n\n| form | {' | '.join(INPUTS)} |\n|{'---|' * (len(INPUTS) + 1)}")
        for form, gradients in forms.items():
            pairs = zip(gradients(case), exact, strict=True)
            errors = (
                f"{np.linalg.norm(actual - expected) / np.linalg.norm(expected):.0e}" for actual, expected in pairs
            )
            print(f"| {form} | {' | '.join(errors)} |", flush=True)
        print()


if __name__ == "__main__":
    main()
