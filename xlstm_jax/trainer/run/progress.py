"""The progress of a run: everything a trainer counts, saved and restored as one value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax.core import unfreeze

from xlstm_jax.common_types import PyTree


@dataclasses.dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    """Steps so far."""
    num_drawn: int = 0
    """Batches drawn from the train loader, skipped ones included."""
    num_epochs_finished: int = 0
    tokens_seen: int = 0
    """Inputs of the model so far, padding included."""
    train_metrics: PyTree = None
    """Training metrics that are not logged yet; `None` stands for zeros. Restored ones are NumPy arrays until the next
    step."""
    skipped_batches: set[int] = dataclasses.field(default_factory=set)
    """Batches to skip, counted as by `num_drawn`: each made a step bad before a rollback."""
    num_rollbacks: int = 0
    validated_step: int | None = None
    """The last step that was validated."""

    def to_document(self) -> dict[str, Any]:
        """Return all fields as JSON can hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        metrics = jax.tree.map(lambda x: np.asarray(x).tolist(), unfreeze(self.train_metrics or {}))
        return values | {"train_metrics": metrics, "skipped_batches": sorted(self.skipped_batches)}

    def restore(self, document: Mapping[str, Any], step: int) -> None:
        """Replace all fields by those of a checkpoint.

        Args:
            document: What `to_document` returned, possibly in an older version: a missing field gets its default. It
                may hold further entries.
            step: The step of the train state. It replaces the step of the document, and one batch per step is assumed
                where `num_drawn` is missing.
        """
        names = {field.name for field in dataclasses.fields(self)}
        known = {name: value for name, value in document.items() if name in names}
        known["skipped_batches"] = set(known.get("skipped_batches", ()))
        metrics = known.get("train_metrics") or {}
        known["train_metrics"] = jax.tree.map(np.asarray, metrics, is_leaf=lambda x: isinstance(x, list)) or None
        vars(self).update(vars(Progress(**{"num_drawn": step, **known, "step": step})))
