"""The header printed before a training run (devices, sizes, estimates) and the summary printed after it."""

from collections.abc import Mapping
from typing import Any

import jax
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from xlstm_jax.cli.shared.gpu_check import gpu_problem
from xlstm_jax.cli.shared.gpu_memory import current_fraction
from xlstm_jax.cli.shared.screen import as_command, as_typed
from xlstm_jax.dataset.sources.compressors import PRIMED_XZ
from xlstm_jax.dataset.sources.text_measures import TextMeasures
from xlstm_jax.models.blocks.kind import block_kind
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.planning.abstract import AbstractTrainer
from xlstm_jax.planning.communication import estimate_communication
from xlstm_jax.planning.estimate import step_time
from xlstm_jax.planning.memory import list_parameters, state_memory
from xlstm_jax.planning.plan import resolve_accelerator
from xlstm_jax.recipes.run import Run
from xlstm_jax.trainer.base.compiled_step import CompiledMemory, memory_limit
from xlstm_jax.trainer.base.run_metrics import mfu_flops

GIB = 2**30


def describe_start(run: Run) -> Any:
    """Return the header of a run in the first process; `None` in others."""
    if jax.process_index() != 0:
        return None
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(run).items():
        table.add_row(Text(name, style="dim"), Text(value))
    verb = f"resumes from step {run.trainer.global_step}" if run.trainer.global_step else "starts"
    return Panel(table, title=f"{run.config.name} {verb}", title_align="left", border_style="dim")


def describe_end(run: Run) -> Any:
    """Return the summary of a run in the first process; `None` in others."""
    if jax.process_index() != 0:
        return None
    report = run.folder / "report.html"
    status = {
        "success": "is done",
        "nan": "stopped at a bad step",
        "skipped": "skipped too many bad steps and ended",
    }.get(str(run.trainer.status), "has ended")
    longer = 2 * (run.config.num_train_steps or run.trainer.global_step)
    lines = [f"{run.config.name} {status} at step {run.trainer.global_step}.", f"  run     {as_typed(run.folder)}"]
    lines += [f"  report  {as_typed(report)}"] if report.exists() else []
    lines += [
        "Next:",
        f"  {as_command('generate', run.folder, '--prompt', _example_prompt(run))}",
        f"  {as_command('resume', run.folder, f'num_train_steps={longer}')}",
        f"  {as_command('report', run.folder, 'ANOTHER_RUN')}",
    ]
    return "\n".join(lines)


def _example_prompt(run: Run) -> str:
    prompts = [prompt for callback in run.config.trainer.callbacks for prompt in getattr(callback, "prompts", [])]
    return next((prompt for prompt in prompts if isinstance(prompt, str)), "The ")


def _facts(run: Run) -> Mapping[str, str]:
    trainer, config = run.trainer, run.config
    shape: Any = config.model.model_config
    num_tokens = config.batch_size * config.context_length
    facts = {
        "devices": _describe_devices(trainer.mesh),
        **({} if (problem := gpu_problem()) is None else {"note": problem}),
        "kernels": _describe_kernels(shape),
        "parameters": f"{trainer.get_num_params():,}{_describe_flops(shape, config.context_length)}",
        **({} if run.initialised_from is None else {"start": run.initialised_from}),
        "batch": f"{config.batch_size} × {config.context_length} = {num_tokens:,} tokens",
        "performance": run.performance.reason,
    }
    if trainer.compiled_memory is not None:
        facts["memory"] = _describe_memory(trainer.compiled_memory, run.performance.memory_limit)
    if run.validation_text is not None and run.validation_text.compressors:
        facts["compressors"] = _describe_compressors(run.validation_text)
    if config.num_train_steps is not None:
        facts["length"] = f"{config.num_train_steps:,} steps, {config.num_train_steps * num_tokens:,} tokens"
        if (seconds := _estimate_step_seconds(run)) is not None:
            left = (config.num_train_steps - trainer.global_step) * seconds
            facts["length"] += f"; estimated {_duration(left)}"
    return {**facts, "folder": as_typed(run.folder)}


def _describe_compressors(text: TextMeasures) -> str:
    reached = ", ".join(f"{name} {bits:.2f}" for name, bits in text.compressors.items())
    note = "primed with the training text" if PRIMED_XZ in text.compressors else "without the training text"
    return f"{reached} bits per byte on the {text.num_bytes:,} bytes of validation text, {note}"


def _describe_flops(shape: Any, context_length: int) -> str:
    flops = mfu_flops(shape, context_length)
    return f"; {flops['mfu']:.3g} FLOPs per token for MFU, {flops['mfu_6n']:.3g} for 6N-MFU" if flops else ""


def _describe_memory(compiled: CompiledMemory, limit: int | None) -> str:
    available = "" if limit is None else f" of {limit / GIB:.2f} GiB"
    state = f"{compiled.arguments / GIB:.2f} GiB are parameters, optimizer and batch"
    return f"{compiled.peak / GIB:.2f}{available or ' GiB'} on a device, as compiled; {state}"


def _describe_devices(mesh: Any) -> str:
    axes = " × ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    device = mesh.devices.flat[0]
    limit = memory_limit(device)
    usable = "" if limit is None else f", {limit / GIB:.1f} GiB usable ({current_fraction():.0%} of its memory)"
    return f"{mesh.size} × {device.device_kind}" + (f" ({axes})" if axes else "") + usable


def _describe_kernels(shape: Any) -> str:
    if not isinstance(shape, LanguageModelConfig):
        return "the model's own"
    lines = (block_kind(kind).describe_backend(shape) for kind in shape.kinds)
    return "\n".join(line for line in dict.fromkeys(lines) if line)


def _estimate_step_seconds(run: Run) -> float | None:
    """Estimate the time of a step without tracing it; `None` for unknown models and devices."""
    config, device = run.config, run.trainer.mesh.devices.flat[0]
    if not isinstance(config.model.model_config, LanguageModelConfig):
        return None
    setup = config.setup(run.trainer.mesh.size)
    kind = "cpu" if device.platform == "cpu" else device.device_kind
    try:
        accelerator = resolve_accelerator(kind, setup.num_devices)
    except ValueError:  # an unknown device
        return None
    trainer = AbstractTrainer.from_setup(setup)
    communication = estimate_communication(setup, list_parameters(trainer))
    return step_time(setup, state_memory(trainer), communication, accelerator).total


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
