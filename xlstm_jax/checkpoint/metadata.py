"""What a checkpoint says about the run that wrote it, and whether that run can go on under another config."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

VERSION = 1
"""Of the layout of checkpoints; one that is higher is not read."""
ABSENT = "absent"

_FREE_MODEL_FIELDS = re.compile(
    r"(^|\.)(parallel\..*|\w*dtype|\w*_backend|\w*chunk_size|\w*dropout\w*|\w*_init|scan_blocks|remat|keep_logits|max_state_length)$"
)
"""Fields that change how a model is computed, initialised or regularised, but not what its parameters mean."""


class Difference(NamedTuple):
    """A setting that is not what it was when a checkpoint was written."""

    name: str
    old: Any
    new: Any

    @property
    def forbids_resuming(self) -> bool:
        """Whether the state of the old run makes no sense under the new setting."""
        if ABSENT in (self.old, self.new):
            return False
        section, _, field = self.name.partition(".")
        return self.name == "optimizer.name" or (section == "model" and not _FREE_MODEL_FIELDS.search(field))

    def __str__(self) -> str:
        return f"{self.name}: {self.old} → {self.new}"


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Find where two runs differ.

    Args:
        old: The configs of the run that wrote a checkpoint, as its metadata hold them.
        new: The configs of this run, from `to_dict`, under the same names.

    Returns:
        The differences, in the order of the settings.
    """
    before, after = (dict(_settings(json.loads(json.dumps(config)))) for config in (old, new))
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names]
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def _settings(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings under names such as `model.parallel.remat`; lists of configs are numbered."""
    if isinstance(config, list) and any(isinstance(element, dict) for element in config):
        config = dict(enumerate(config))
    if not isinstance(config, dict):
        yield name, config
        return
    for key, value in config.items():
        yield from _settings(value, f"{name}.{key}" if name else str(key))
