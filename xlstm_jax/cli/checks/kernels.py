"""List which backends of each kernel can run here, why the others cannot, and which one `auto` selects."""

import xlstm_jax.models.xlstm  # noqa: F401 (registers its kinds)
from xlstm_jax.cli.checks.section import PASSED, Section
from xlstm_jax.models.blocks.kind import all_kinds
from xlstm_jax.models.llama.layer import SAMPLE_DTYPE, SAMPLE_HEAD_DIM

KERNELS = tuple(dict.fromkeys(kind.kernel for kind in all_kinds() if kind.kernel is not None))
"""The kernels of all registered block kinds."""


def check_kernels(title: str) -> Section:
    """List every backend; a backend that cannot run here is not reported as a problem."""
    section = Section(title, ("kernel", "backend", "runs here"))
    for kernel in KERNELS:
        chosen, reason = kernel.choose()
        for backend in kernel.backends:
            obstacle = kernel.obstacle(backend)
            section.add(kernel.name, backend, PASSED if obstacle is None else f"no: {obstacle}")
        section.add(kernel.name, "auto", f"{chosen}: {reason}")
    section.notes.append(f"Attention is checked for heads of {SAMPLE_HEAD_DIM} features in {SAMPLE_DTYPE.name}.")
    return section
