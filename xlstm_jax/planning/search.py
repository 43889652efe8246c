"""Search for the cheapest remat, accumulation and mesh with which a run fits into the memory of its devices."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.shared.stack import RematPolicy
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.activations import kept_activations
from xlstm_jax.planning.communication import estimate_communication
from xlstm_jax.planning.compiled import CompiledMemory
from xlstm_jax.planning.estimate import Assumptions, step_time
from xlstm_jax.planning.memory import (
    Parameter,
    PersistentMemory,
    bytes_per_device,
    list_parameters,
    state_memory,
)
from xlstm_jax.planning.setup import Setup
from xlstm_jax.planning.simulate import compiled_memory
from xlstm_jax.utils.accelerators import Accelerator

REMATS: tuple[RematPolicy, ...] = ("none", "norms", "dots", "full")
MODEL_SIZES = (1, 2, 4, 8)
MAX_COMPILATIONS = 8

Report = Callable[[str], None]
"""A callback that receives progress messages of one line."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice of remat, accumulation and mesh, with its time and memory per device."""

    remat: str
    accumulation: int
    axis_sizes: dict[str, int]
    seconds: float
    """The estimated step time."""
    least: int
    """A lower bound on the needed bytes: the state; once traced, also the saved activations."""
    compiled: int | None = None
    """Bytes that the compiled step needs."""

    def __str__(self) -> str:
        return f"{mesh_text(self.axis_sizes)}, remat {self.remat}, accumulation {self.accumulation}"


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    setup: Setup | None
    """The cheapest run that fits; `None` if no compiled candidate fits."""
    found: Candidate | None
    compiled: CompiledMemory | None
    """The memory of its compiled step."""
    tried: tuple[Candidate, ...]
    """All candidates that were compiled or rejected by their activations, cheapest first."""
    num_candidates: int
    num_too_large: int
    """Candidates whose state alone is too large."""
    is_complete: bool
    """Whether no candidate was skipped because of the limit on compilations."""
    smallest_miss: int | None
    """By how many bytes the smallest candidate exceeds the target, if none fits: by compiled size or, if nothing was
    compiled, by the lower bound."""


def search(
    setup: Setup,
    target_memory: int | float,
    accelerator: Accelerator,
    *,
    remats: Sequence[RematPolicy] = REMATS,
    model_sizes: Sequence[int] = MODEL_SIZES,
    max_compilations: int = MAX_COMPILATIONS,
    assumptions: Assumptions | None = None,
    report: Report = lambda _: None,
) -> SearchResult:
    """Find the cheapest remat, accumulation and mesh whose compiled step fits into a target memory.

    Candidates are tried in the order of their estimated step time. Candidates whose state is too large are discarded
    immediately, those that save too many activations after tracing; the others are compiled until one fits.

    Args:
        setup: The run. Its number of devices, batch and pipeline axis are fixed.
        target_memory: The available bytes per device.
        accelerator: The device for which times are estimated.
        remats: The remat policies to try.
        model_sizes: The sizes of the model axis to try.
        max_compilations: The maximum number of compilations.
        assumptions: The achieved shares of the device's rates.
        report: Called with a progress message at each step of the search.

    Returns:
        The result.
    """
    ways = list(_ways(setup, remats, model_sizes, accelerator, assumptions, report))
    ways.sort(key=lambda way: (way[0].seconds, way[0].accumulation, *way[0].axis_sizes.values()))
    possible = [way for way in ways if way[0].least <= target_memory]
    report(f"{len(ways)} candidates; the state alone is too large for {len(ways) - len(possible)} of them.")
    tried: list[Candidate] = []
    num_compilations, found, compiled = 0, None, None
    for candidate, way in possible:
        least = candidate.least + _least_temporaries(way)
        if least > target_memory:
            tried.append(dataclasses.replace(candidate, least=least))
            report(f"{candidate}: at least {_gib(least)}, too much.")
            continue
        if num_compilations == max_compilations:
            break
        num_compilations += 1
        report(f"{candidate}: compiling ({num_compilations} of at most {max_compilations}) ...")
        compiled = compiled_memory(way)
        tried.append(dataclasses.replace(candidate, least=least, compiled=compiled.peak))
        report(f"{candidate}: {_gib(compiled.peak)}.")
        if compiled.peak <= target_memory:
            found = way
            break
    needs = [candidate.compiled for candidate in tried if candidate.compiled is not None]
    needs = needs or [candidate.least for candidate in tried] or [candidate.least for candidate, _ in ways]
    return SearchResult(
        setup=found,
        found=tried[-1] if found else None,
        compiled=compiled if found else None,
        tried=tuple(tried),
        num_candidates=len(ways),
        num_too_large=len(ways) - len(possible),
        is_complete=found is not None or len(tried) == len(possible),
        smallest_miss=None if found or not needs else math.ceil(min(needs) - target_memory),
    )


def _least_temporaries(setup: Setup) -> int:
    """Return a lower bound on the temporary bytes of a step: activations and, with accumulation, summed gradients."""
    trainer = AbstractTrainer.from_setup(setup)
    gradients = bytes_per_device(trainer.state.params) if setup.accumulation > 1 else 0
    return kept_activations(trainer) + gradients


def _ways(
    setup: Setup,
    remats: Sequence[RematPolicy],
    model_sizes: Sequence[int],
    accelerator: Accelerator,
    assumptions: Assumptions | None,
    report: Report,
) -> Iterator[tuple[Candidate, Setup]]:
    """Yield all possible candidates with their setups."""
    pipeline = setup.axis_sizes[setup.model.parallel.pipeline_axis_name]
    num_heads = math.gcd(*(block_kind(kind).num_heads(setup.shape) for kind in setup.shape.kinds))
    for model in model_sizes:
        num_left = setup.num_devices // (model * pipeline)
        if setup.num_devices % (model * pipeline) or num_heads % model:
            report(f"{num_heads} heads on {setup.num_devices} devices leave no room for tp {model}.")
            continue
        for fsdp in _divisors(num_left):
            base = setup.with_choices(remat="full", accumulation=1, fsdp=fsdp, model=model)
            try:
                memory, parameters = _layout(base)
            except ValueError as error:
                report(f"fsdp {fsdp}, tp {model} is impossible: {error}")
                continue
            for remat in remats:
                for accumulation in _divisors(base.rows):
                    way = setup.with_choices(remat=remat, accumulation=accumulation, fsdp=fsdp, model=model)
                    time = step_time(way, memory, estimate_communication(way, parameters), accelerator, assumptions)
                    yield Candidate(remat, accumulation, way.axis_sizes, time.total, memory.total), way


def _layout(setup: Setup) -> tuple[PersistentMemory, tuple[Parameter, ...]]:
    trainer = AbstractTrainer.from_setup(setup)
    return state_memory(trainer), list_parameters(trainer)


def mesh_text(axis_sizes: dict[str, int]) -> str:
    """Format the sizes of a mesh, without axes of size 1."""
    return " × ".join(f"{axis} {size}" for axis, size in axis_sizes.items() if size > 1) or "one device"


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
