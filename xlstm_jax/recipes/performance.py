"""Resolve `performance: auto` to concrete settings for the devices of a run, and save them with the run.

`auto` chooses only settings that trade memory for speed, and only if neither a recipe nor a file nor the command line
sets them. The choice is made by formula (`planning.performance`), checked against the compiled step, and replaced by
the next-best one if the step does not fit. A resumed run keeps the choice of its first start, unless its devices,
model, batch or fixed settings changed.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from xlstm_jax.configs import ConfigError
from xlstm_jax.models.language_model import LanguageModelConfig
from xlstm_jax.planning.performance import (
    MODEL_SETTINGS,
    TRAINER_SETTINGS,
    USABLE_SHARE,
    Choice,
    fitting,
    largest_batch,
    rank,
)
from xlstm_jax.recipes.processes import from_first_process
from xlstm_jax.recipes.run_config import RunConfig
from xlstm_jax.trainer.base.compiled_step import StepDoesNotFitError, memory_limit
from xlstm_jax.utils.accelerators import Accelerator, find_accelerator, of_device_kind
from xlstm_jax.utils.files import write_atomically

LOGGER = logging.getLogger(__name__)

PERFORMANCE_FILE = "performance.json"
"""The file in a run's folder that stores the choice and its reason."""
UNKNOWN_GPU = "a100-80"
"""The GPU whose rates are used for unknown devices; only the order of choices depends on them."""
OUT_OF_MEMORY_FACTOR = 1.1
"""The assumed ratio of needed to estimated memory for a step that ran out of memory."""
UNREPORTED_SHARE = 0.9
"""The share of the data sheet's memory that is used as the limit if the device reports none."""
HOPELESS = 1.05
"""A run whose smallest estimate exceeds the memory by this factor is rejected without compiling it."""
GIB = 2**30


class Devices(NamedTuple):
    """The devices of a run, as far as a choice depends on them."""

    platform: str
    kind: str
    axis_sizes: dict[str, int]
    memory_limit: int | None
    """Bytes per device; `None` if unknown."""

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.axis_sizes.values())

    @property
    def accelerator(self) -> Accelerator:
        """The rates of the devices, or those of `UNKNOWN_GPU`."""
        return of_device_kind(self.kind) or find_accelerator(UNKNOWN_GPU)


@dataclasses.dataclass(frozen=True)
class Performance:
    """The choice for a run, and its reason."""

    settings: dict[str, Any]
    """The chosen settings by name; empty if the settings of the run are used unchanged."""
    reason: str
    """The reason, for the header and the log."""
    memory_limit: int | None = None
    """Bytes that JAX may allocate per device."""
    estimate: int | None = None
    """Estimated bytes that the step needs."""

    @property
    def is_chosen(self) -> bool:
        """Whether `auto` made a choice, so that another one can replace it."""
        return bool(self.settings)

    def apply(self, config: RunConfig) -> RunConfig:
        """Return the config of a run with the choice applied."""
        model = {name: self.settings[name] for name in MODEL_SETTINGS if name in self.settings}
        trainer = {name: self.settings[name] for name in TRAINER_SETTINGS if name in self.settings}
        shape: Any = config.model.model_config
        return dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, model_config=dataclasses.replace(shape, **model))
            if model
            else config.model,
            trainer=dataclasses.replace(config.trainer, **trainer),
        )


def describe_devices(mesh: Mesh) -> Devices:
    """Describe the devices of a mesh; the memory is that of this process's first device."""
    device = mesh.local_devices[0]
    return Devices(device.platform, device.device_kind, dict(mesh.shape), usable_memory(device))


def usable_memory(device: Any) -> int | None:
    """Return the bytes that JAX may allocate on a device: the reported limit, else most of the data sheet's memory.

    Some allocators report no limit. `None` if the device is unknown too.
    """
    limit, accelerator = memory_limit(device), of_device_kind(device.device_kind)
    if limit is None and accelerator is not None:
        return int(UNREPORTED_SHARE * accelerator.memory)
    return limit


def planned_devices(accelerator: Accelerator, axis_sizes: Mapping[str, int]) -> Devices:
    """Describe devices that this machine does not have, with the memory of their data sheet as the limit."""
    if not accelerator.device_kinds:
        return Devices("cpu", accelerator.name, dict(axis_sizes), None)
    platform = "gpu" if accelerator.is_gpu else "tpu"
    return Devices(platform, accelerator.device_kinds[0], dict(axis_sizes), int(accelerator.memory))


def resolve_performance(
    config: RunConfig, settings: Mapping[str, Any], devices: Devices, folder: Path | None
) -> Performance:
    """Resolve `performance: auto` to settings; the first process decides for all.

    Args:
        config: The run as built from its settings.
        settings: The settings with all references resolved; those that are given are never changed.
        devices: The devices of the run.
        folder: The folder of the run, which may hold the choice of an earlier start; `None` for a plan.

    Returns:
        The choice, which is also saved in the folder.

    Raises:
        ConfigError: No choice fits into the memory of the devices.
    """
    if why_not := _why_not_auto(config, devices):
        return Performance({}, why_not, devices.memory_limit)

    def choose() -> dict[str, Any]:
        try:
            return dataclasses.asdict(_choose(config, given_settings(settings, config), devices, folder))
        except ConfigError as error:
            return {"error": str(error)}

    chosen = from_first_process(choose)
    if "error" in chosen:
        raise ConfigError(chosen["error"])
    return Performance(**chosen)


def given_settings(settings: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the given settings that `auto` would choose otherwise, by name."""
    given = {}
    for section, names, values in (
        ("model", MODEL_SETTINGS, config.model.model_config),
        ("trainer", TRAINER_SETTINGS, config.trainer),
    ):
        written = settings.get(section)
        given |= {name: getattr(values, name) for name in names if isinstance(written, Mapping) and name in written}
    if "Block" in config.model.parallel.remat:
        given["remat"] = getattr(config.model.model_config, "remat", "none")
    return given


def reject(folder: Path, performance: Performance, error: StepDoesNotFitError) -> None:
    """Record that a choice does not fit, so that the next `resolve_performance` makes another one."""
    LOGGER.warning("%s Trying the next choice of performance: auto, as %s did not fit.", error, performance.reason)
    if jax.process_index() == 0:
        kept = _read(folder)
        needed = error.needed or int(OUT_OF_MEMORY_FACTOR * max(performance.estimate or 0, error.limit or 0))
        rejected = {"settings": performance.settings, "estimate": performance.estimate, "needed": needed}
        _write(folder, kept | {"rejected": [*kept.get("rejected", []), rejected]})


def _why_not_auto(config: RunConfig, devices: Devices) -> str | None:
    """Return why `auto` does not apply and the settings of a run are used unchanged; `None` if it applies."""
    if config.performance == "manual":
        return "as set (performance: manual)"
    if not isinstance(config.model.model_config, LanguageModelConfig):
        return "as set, for the memory of this model is not known"
    if devices.platform == "cpu":
        return "the defaults, as this is a CPU"
    if config.trainer.debug:
        return "as set, for a run that is debugged compiles nothing"
    if devices.memory_limit is None:
        return f"as set, for {devices.kind} does not report its memory"
    return None


def _choose(config: RunConfig, given: Mapping[str, Any], devices: Devices, folder: Path | None) -> Performance:
    limit = devices.memory_limit
    assert limit is not None
    made_for = {
        "device": devices.kind,
        "mesh": devices.axis_sizes,
        "batch_size": config.batch_size,
        "context_length": config.context_length,
        "model": _describe_model(config.model.model_config),
        "given": dict(given),
    }
    made_for = json.loads(json.dumps(made_for, default=str))
    kept = {} if folder is None else _read(folder)
    # Files of earlier versions do not store the model.
    is_same = bool(kept) and {"model": made_for["model"]} | kept["made_for"] == made_for
    rejected = kept.get("rejected", []) if is_same else []
    if is_same and kept["settings"] not in [each["settings"] for each in rejected]:
        return Performance(kept["settings"], kept["reason"], limit, kept["estimate"])
    if kept and not is_same:
        changed = [name for name, value in made_for.items() if kept.get("made_for", {}).get(name) != value]
        LOGGER.info("performance: auto chooses anew, as %s changed.", ", ".join(changed))
    try:
        best = _best(config, given, devices, rejected)
    except ConfigError:
        if rejected and folder is not None:  # More memory may be free at the next start, so it tries all choices again.
            (folder / PERFORMANCE_FILE).unlink()
        raise
    free = [name for name in best.settings if name not in given]
    reason = f"{best} (auto: about {best.memory / GIB:.1f} of {limit / GIB:.1f} GiB)"
    result = Performance({name: best.settings[name] for name in free}, reason, limit, best.memory)
    if folder is not None:
        values = {"settings": result.settings, "reason": reason, "estimate": best.memory, "memory_limit": limit}
        _write(folder, {"made_for": made_for, **values, "rejected": rejected})
    return result


def _describe_model(shape: Any) -> dict[str, Any]:
    """Return the fields of a model's config that its memory depends on, without those that `auto` chooses."""
    return {
        field.name: getattr(shape, field.name)
        for field in dataclasses.fields(shape)
        if field.name not in (*MODEL_SETTINGS, "parallel")
    }


def _best(config: RunConfig, given: Mapping[str, Any], devices: Devices, rejected: list[dict[str, Any]]) -> Choice:
    setup, limit = config.setup(devices.num_devices), devices.memory_limit or 0
    factors = getattr(config.data.first, "batch_rampup_factors", None) or {}
    choices = rank(
        setup,
        devices.accelerator,
        given=given,
        num_steps=config.num_train_steps,
        row_counts=[round(factor * config.batch_size) for factor in factors.values()],
    )
    tried = [each["settings"] for each in rejected]
    left = [choice for choice in choices if not any(_agrees(choice, settings) for settings in tried)]
    # Scale the other estimates by the worst ratio of needed to estimated memory seen so far.
    excess = max([1.0, *(each["needed"] / each["estimate"] for each in rejected if each["estimate"])])
    if fits := fitting(left, int(limit / excess)):
        return fits[0]
    smallest = min(left, key=lambda choice: choice.memory, default=None)
    if smallest is not None and smallest.memory * excess <= HOPELESS * limit:
        return smallest  # The estimate may be too high: the compiled step decides.
    raise ConfigError(_describe_misfit(config, given, devices, choices, excess))


def _agrees(choice: Choice, settings: Mapping[str, Any]) -> bool:
    return all(getattr(choice, name) == value for name, value in settings.items())


def _describe_misfit(
    config: RunConfig, given: Mapping[str, Any], devices: Devices, choices: list[Choice], excess: float
) -> str:
    """Return a message on what does not fit and which settings would."""
    limit = int((devices.memory_limit or 0) / excess)
    usable = f"the {USABLE_SHARE * (devices.memory_limit or 0) / GIB:.1f} GiB that a step may take on {devices.kind}"
    what = (
        f"batch_size={config.batch_size} with rows of {config.context_length} tokens on {devices.num_devices} device(s)"
    )
    if not choices:
        return f"{what}: no number of minibatches divides the rows of a device in every stage of the batch ramp-up."
    least = min(choice.memory for choice in choices) * excess / GIB
    fixed = f" with {', '.join(f'{name}={value}' for name, value in given.items())} as set" if given else ""
    problem = f"{what} does not fit{fixed}: it needs at least {least:.1f} GiB, more than {usable}"
    rows = largest_batch(config.setup(devices.num_devices), devices.accelerator, limit, given)
    if rows is not None:
        return f"{problem}. batch_size={rows} would fit."
    return f"{problem}. No batch size fits: shard the model over more devices with parallel=fsdp, or shorten the rows."


def _read(folder: Path) -> dict[str, Any]:
    file = folder / PERFORMANCE_FILE
    if not file.is_file():
        return {}
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return kept if {"made_for", "settings", "reason", "estimate"} <= set(kept) else {}
    except (ValueError, TypeError):
        LOGGER.warning("%s is damaged: performance: auto chooses anew.", file)
        return {}


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    write_atomically(folder / PERFORMANCE_FILE, json.dumps(values, indent=2) + "\n")
