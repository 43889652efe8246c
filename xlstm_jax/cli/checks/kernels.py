"""Which forms of each kernel can run here, why the others cannot, and which one `auto` picks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp

from xlstm_jax.cli.checks.section import PASSED, Section
from xlstm_jax.kernels.mlstm import api as mlstm_api
from xlstm_jax.kernels.slstm import api as slstm_api
from xlstm_jax.models.llama import attention

HEAD_DIM = 64
HALF = jnp.dtype("bfloat16")


class Kernel(NamedTuple):
    """The backends of a kernel, and what its module knows about them."""

    name: str
    backends: tuple[str, ...]
    resolve: Callable[[Any], str]
    """Raises a `ValueError` with the reason if a backend cannot run here."""
    choose: Callable[[], tuple[str, str]]
    """What `auto` picks, and why."""

    def obstacle(self, backend: str) -> str | None:
        """Say why a backend cannot run here, or nothing if it can."""
        try:
            self.resolve(backend)
        except ValueError as error:
            return str(error)
        return None


KERNELS = (
    Kernel("mLSTM", get_args(mlstm_api.Form), mlstm_api.resolve_backend, mlstm_api.choose_backend),
    Kernel("sLSTM", get_args(slstm_api.Form), slstm_api.resolve_backend, slstm_api.choose_backend),
    Kernel(
        "attention",
        tuple(backend for backend in attention.BACKENDS if backend != "auto"),
        functools.partial(attention.resolve_backend, dtype=HALF, head_dim=HEAD_DIM),
        functools.partial(attention.choose_backend, HALF, HEAD_DIM),
    ),
)


def check_kernels(title: str) -> Section:
    """List every backend; one that needs another device is no problem."""
    section = Section(title, ("kernel", "backend", "runs here"))
    for kernel in KERNELS:
        chosen, reason = kernel.choose()
        for backend in kernel.backends:
            obstacle = kernel.obstacle(backend)
            section.add(kernel.name, backend, PASSED if obstacle is None else f"no: {obstacle}")
        section.add(kernel.name, "auto", f"{chosen}: {reason}")
    section.notes.append(f"Attention is asked for heads of {HEAD_DIM} features in {HALF.name}.")
    return section
