"""The length of a run, in steps and epochs."""

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from xlstm_jax.trainer.data_module import DataIterator


@dataclasses.dataclass(frozen=True)
class Plan:
    """The number of steps of a run, and the length of its epochs."""

    num_train_steps: int
    steps_per_epoch: int | None
    """`None` if unknown: then an epoch ends with the data."""
    num_epochs: int | None = None

    def begins_epoch(self, num_drawn: int) -> bool:
        """Check whether the next batch is known to be the first of an epoch."""
        return self.steps_per_epoch is not None and num_drawn % self.steps_per_epoch == 0

    def epoch_at(self, num_drawn: int, num_finished: int) -> int:
        """Return the index of the epoch that the next batch belongs to, from 1.

        Args:
            num_drawn: The number of batches so far.
            num_finished: The number of finished epochs, for data of unknown length.
        """
        return (num_finished if self.steps_per_epoch is None else num_drawn // self.steps_per_epoch) + 1


def plan_run(
    train_loader: DataIterator, num_epochs: int | None, num_train_steps: int | None, steps_per_epoch: int | None
) -> Plan:
    """Determine how long to train.

    Args:
        train_loader: The batches to train on.
        num_epochs: The number of epochs; give this or `num_train_steps`.
        num_train_steps: The number of steps.
        steps_per_epoch: The length of an epoch; that of the loader by default.

    Returns:
        The plan.
    """
    if (num_epochs is None) == (num_train_steps is None):
        raise ValueError(
            f"num_epochs is {num_epochs} and num_train_steps is {num_train_steps}: give exactly one of them."
        )
    if train_loader is None:
        raise ValueError("train_loader is None: give the batches to train on.")
    for name, value in {"num_epochs": num_epochs, "num_train_steps": num_train_steps}.items():
        if value is not None and (not isinstance(value, numbers.Real) or value < 1 or value != int(value)):
            raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1.")
    if steps_per_epoch is None:
        steps_per_epoch = _length(train_loader)
    if steps_per_epoch is not None and steps_per_epoch < 1:
        raise ValueError("The train loader is empty: it has fewer examples than a batch, or its files hold nothing.")
    if num_train_steps is None:
        if steps_per_epoch is None:
            raise ValueError(
                "The train loader does not say how long an epoch is: pass steps_per_epoch, or num_train_steps instead "
                "of num_epochs."
            )
        num_train_steps = steps_per_epoch * (num_epochs or 0)
    return Plan(num_train_steps, steps_per_epoch, num_epochs)


def describe_data(plan: Plan, loaders: Mapping[str, Any], num_rows: int, mesh: Mesh) -> dict[str, Any]:
    """Return the numbers to log about the data of a run, without unknown ones."""
    data_axes = mesh.devices.shape[0] * mesh.devices.shape[1]
    numbers: dict[str, Any] = {
        "global_batch_size": num_rows,
        "local_batch_size": num_rows // data_axes,
        "train_steps_per_epoch": plan.steps_per_epoch,
        "num_epochs": plan.num_epochs,
        "num_train_steps": plan.num_train_steps,
    }
    for name, loader in loaders.items():
        parts = (
            {f"{name}_{key}": part for key, part in loader.items()} if isinstance(loader, Mapping) else {name: loader}
        )
        numbers |= {f"{key}_dataset_size": getattr(part, "dataset_size", None) for key, part in parts.items()}
    return {key: number for key, number in numbers.items() if number is not None}


def describe_mesh(mesh: Mesh, num_processes: int) -> dict[str, int]:
    """Return the numbers to log about the devices of a run."""
    dp, fsdp, pipeline, model = mesh.devices.shape[:4]
    return {
        "dp_axis_size": dp,
        "fsdp_axis_size": fsdp,
        "pipeline_axis_size": pipeline,
        "model_axis_size": model,
        "combined_dp_axis_size": dp * fsdp,
        "num_devices": mesh.size,
        "num_processes": num_processes,
    }


def _length(loader: Any) -> int | None:
    """Return the length of a loader; `None` if it has none, or raises because it is endless."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return None
