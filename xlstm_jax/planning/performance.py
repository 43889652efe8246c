"""Rank the settings that affect speed and memory but not results, to find the fastest ones that fit into memory.

Formulas estimate the step time and the memory footprint of every combination. Combinations are ranked by the time of
the whole run including compilation, so blocks are unrolled only if that pays off. Step times are calibrated on an H200,
and only their order is used; `tests/planning/test_performance.py` compares the order with measurements.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xlstm_jax.models.shared.stack import RematPolicy, is_scanned, period
from xlstm_jax.planning.estimate import step_flops
from xlstm_jax.planning.footprint import StateBytes, recomputed_and_stacked, state_bytes, step_memory
from xlstm_jax.planning.setup import Setup
from xlstm_jax.utils.accelerators import Accelerator

GIB = 2**30

REMATS: tuple[RematPolicy, ...] = ("none", "norms", "dots", "full")
LOSS_CHUNK_SIZES = (8192, 1024)
USABLE_SHARE = 0.96
"""The share of device memory that a footprint may use, as it is an estimate."""
MATMUL_SHARE = 0.72
"""The share of peak FLOPs that matmuls reach on an H200."""
BANDWIDTH_SHARE = 0.8
STACKING_PASSES = 3
"""Extra passes over the activations that a scan saves, for stacking and slicing them."""
SECONDS_PER_BLOCK = 3.3
"""The time to compile one more unrolled block, on the host of an H200: 25 s for 11 blocks of 162M, 79 s for 23 of
1.42B."""
SECONDS_PER_MINIBATCH_AND_BLOCK = 4e-4
"""The fixed cost per minibatch and block: 162M takes 226 ms for two minibatches of 8 rows, 215 ms for one of 16."""
UNKNOWN_LENGTH = 1000
"""The assumed number of steps of a run if only its number of epochs is known."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Settings that trade memory for speed, with estimates of both."""

    remat: RematPolicy
    keep_logits: bool
    loss_chunk_size: int
    scan_blocks: bool
    gradient_accumulate_steps: int
    gradient_accumulate_scan: bool
    memory: int = dataclasses.field(compare=False)
    """Estimated bytes per device."""
    seconds: float = dataclasses.field(compare=False)
    """Estimated step time; only used to order choices."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, without estimates."""
        return {name: getattr(self, name) for name in SETTINGS}

    def __str__(self) -> str:
        minibatches = self.gradient_accumulate_steps
        return (
            f"remat {self.remat}, logits {'kept' if self.keep_logits else 'recomputed'}, blocks "
            f"{'scanned' if self.scan_blocks else 'unrolled'}, {minibatches} minibatch{'es' * (minibatches > 1)}"
        )


MODEL_SETTINGS = ("remat", "keep_logits", "loss_chunk_size", "scan_blocks")
TRAINER_SETTINGS = ("gradient_accumulate_steps", "gradient_accumulate_scan")
SETTINGS = (*MODEL_SETTINGS, *TRAINER_SETTINGS)


def rank(
    setup: Setup,
    accelerator: Accelerator,
    *,
    given: Mapping[str, Any] | None = None,
    num_steps: int | None = None,
    row_counts: Sequence[int] = (),
    state: StateBytes | None = None,
) -> list[Choice]:
    """Return all choices, fastest first.

    Args:
        setup: The run.
        accelerator: The device.
        given: Fixed settings, by their names in `SETTINGS`.
        num_steps: The length of the run in steps.
        row_counts: Other batch sizes of the run, such as those of a batch ramp-up, which minibatches have to divide
            too.
        state: The result of `state_bytes` for this run; computed by default.

    Returns:
        The choices; empty if no number of minibatches divides the rows.
    """
    given = dict(given or {})
    state = state_bytes(setup) if state is None else state
    choices = [_with_estimates(setup, values, accelerator, state) for values in _candidates(setup, given, row_counts)]
    length = UNKNOWN_LENGTH if num_steps is None else num_steps
    return sorted(choices, key=lambda choice: length * choice.seconds + _compile_seconds(setup, choice))


def fitting(choices: Sequence[Choice], limit: int) -> list[Choice]:
    """Return the choices estimated to fit into the memory of a device, in the same order."""
    return [choice for choice in choices if choice.memory <= USABLE_SHARE * limit]


def with_choice(setup: Setup, values: Mapping[str, Any]) -> Setup:
    """Return a run with some settings replaced."""
    model = {name: values[name] for name in MODEL_SETTINGS if name in values}
    trainer = {name: values[name] for name in TRAINER_SETTINGS if name in values}
    shape = dataclasses.replace(setup.shape, **model)
    return dataclasses.replace(
        setup,
        trainer=dataclasses.replace(setup.trainer, **trainer),
        model=dataclasses.replace(setup.model, model_config=shape),
    )


def largest_batch(setup: Setup, accelerator: Accelerator, limit: int, given: Mapping[str, Any]) -> int | None:
    """Return the largest batch size below the run's that fits into device memory with the best settings, if any."""
    step = setup.num_devices * given.get("gradient_accumulate_steps", 1)
    state = state_bytes(setup)

    def fits(num_parts: int) -> bool:
        smaller = dataclasses.replace(setup, batch_size=num_parts * step)
        return bool(fitting(rank(smaller, accelerator, given=given, state=state), limit))

    low, high = 0, (setup.batch_size - 1) // step  # `low` fits, everything above `high` does not
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low * step or None


def _candidates(setup: Setup, given: Mapping[str, Any], row_counts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the combinations of settings that can be optimal."""
    num_groups = setup.batch_size // setup.rows
    rows = math.gcd(setup.rows, *(count // num_groups for count in row_counts))
    is_repetitive = is_scanned(setup.shape.kinds, True)
    options: dict[str, Sequence[Any]] = {
        "remat": REMATS,
        "keep_logits": (False,) if setup.trainer.log_logit_stats else (True, False),
        "loss_chunk_size": LOSS_CHUNK_SIZES,
        "scan_blocks": (True, False) if is_repetitive else (setup.shape.scan_blocks,),
        "gradient_accumulate_steps": [part for part in range(1, rows + 1) if rows % part == 0],
    }
    options.update({name: (value,) for name, value in given.items()})
    scans_minibatches = options.pop("gradient_accumulate_scan", None)
    for values in itertools.product(*options.values()):
        candidate = dict(zip(options, values, strict=True))
        stacks_all = candidate["remat"] == "none" and candidate["scan_blocks"] and is_repetitive
        if stacks_all and "remat" not in given and "scan_blocks" not in given:
            continue  # slower than `dots`, and larger
        steps = candidate["gradient_accumulate_steps"]
        if rows % steps:
            continue
        scans = steps > 1 if scans_minibatches is None else scans_minibatches[0]
        yield candidate | {"gradient_accumulate_scan": scans}


def _with_estimates(setup: Setup, values: dict[str, Any], accelerator: Accelerator, state: StateBytes) -> Choice:
    changed = with_choice(setup, values)
    memory = step_memory(changed, accelerator, state)
    return Choice(**values, memory=memory, seconds=_step_seconds(changed, accelerator, state))


def _step_seconds(setup: Setup, accelerator: Accelerator, state: StateBytes) -> float:
    """Estimate the step time: matmuls, and the memory traffic in which choices differ."""
    recomputed, stacked = recomputed_and_stacked(setup, accelerator)
    # Recomputed activations are read and written once more; a scan moves saved activations into and out of stacks.
    traffic = setup.accumulation * (2 * recomputed + STACKING_PASSES * stacked)
    if setup.shape.keep_logits:
        kept = setup.rows * setup.context_length * setup.shape.vocab_size * 2
        traffic += 2 * kept // setup.axis_sizes[setup.model.parallel.model_axis_name]
    if setup.accumulation > 1:
        traffic += setup.accumulation * 3 * state.parameters
    # The gradient of the head is read and written once per chunk of the loss.
    num_chunks = -(-setup.rows * setup.context_length // setup.shape.loss_chunk_size)
    traffic += 2 * num_chunks * state.of_head
    matmuls = step_flops(setup).executed / setup.num_devices / accelerator.flops(setup.shape.dtype)
    fixed = SECONDS_PER_MINIBATCH_AND_BLOCK * setup.accumulation * setup.shape.num_blocks
    return matmuls / MATMUL_SHARE + traffic / (accelerator.memory_bandwidth * BANDWIDTH_SHARE) + fixed


def _compile_seconds(setup: Setup, choice: Choice) -> float:
    scans = is_scanned(setup.shape.kinds, choice.scan_blocks)
    num_blocks = len(period(setup.shape.kinds)) if scans else setup.shape.num_blocks
    num_copies = 1 if choice.gradient_accumulate_scan else choice.gradient_accumulate_steps
    return SECONDS_PER_BLOCK * num_blocks * num_copies
