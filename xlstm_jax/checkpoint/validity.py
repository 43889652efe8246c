"""Check that a checkpoint is complete and unchanged."""

import json
import logging
from collections.abc import Collection, Mapping
from typing import Any

from etils import epath

from xlstm_jax.checkpoint.checksums import CHECKSUMS_FILE, Checksums, CorruptCheckpointError

LOGGER = logging.getLogger(__name__)


def find_problem(checkpoint: epath.Path, items: Collection[str] | None = None, *, verify: bool = True) -> str | None:
    """Describe the first problem of a checkpoint; `None` if there is none.

    Args:
        checkpoint: The folder of the checkpoint.
        items: The items to check; all saved items by default.
        verify: Whether to compare files with their checksums, if there are any. Otherwise only missing items are
            detected.
    """
    try:
        checksums = Checksums.read(checkpoint)
        if checksums is not None and verify:
            return checksums.problem(checkpoint, items)
        metadata = json.loads((checkpoint / "metadata" / "metadata").read_text())
    except CorruptCheckpointError as error:
        return str(error)
    except FileNotFoundError:
        return "metadata is missing"
    except (OSError, ValueError) as error:
        return f"metadata cannot be read ({error})"
    saved = set(required_items(metadata) if checksums is None else checksums.items)
    missing = [item for item in sorted(saved) if items is None or item in items if not (checkpoint / item).exists()]
    if missing:
        return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    if checksums is None and metadata.get("checksums"):
        return f"{CHECKSUMS_FILE} is missing"
    if checksums is None:
        LOGGER.info("%s has no checksums: it is read without verification.", checkpoint)
    return None


def required_items(metadata: Mapping[str, Any]) -> set[str]:
    """Return the required items of a checkpoint that does not list its items, from the config of the run."""
    if "trainer" not in metadata:
        return {"params"}
    parts = {"opt_state": "save_optimizer_state", "data": "save_dataloader_state"}
    callbacks = metadata["trainer"].get("callbacks", [])
    left_out = {item for item, field in parts.items() if any(callback.get(field) is False for callback in callbacks)}
    return {"params", "step", "rng", "run", *parts} - left_out
