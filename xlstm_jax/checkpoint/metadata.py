"""The settings of the run that wrote a checkpoint, and which differences from them forbid resuming."""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

VERSION = 1
"""The version of the checkpoint layout; a checkpoint of a higher version is refused."""
ABSENT = "absent"


class Difference(NamedTuple):
    """A setting that differs from the one under which a checkpoint was written."""

    name: str
    old: Any
    new: Any
    forbids_resuming: bool = False
    """Whether the state of the old run is invalid under the new setting."""

    def __str__(self) -> str:
        return f"{self.name}: {self.old} → {self.new}"


def compare_configs(
    old: Mapping[str, Any], new: Mapping[str, Any], fixed: Collection[str] = frozenset()
) -> list[Difference]:
    """Find the settings in which two runs differ.

    Args:
        old: The configs of the run that wrote a checkpoint, as stored in its metadata.
        new: The configs of this run, from `to_dict`, under the same names.
        fixed: The settings that a resumed run may not change, see `configs.fixed_settings`.

    Returns:
        The differences, in the order of the settings. A setting that only one of the runs has never forbids resuming.
    """
    before, after = (dict(_settings(json.loads(json.dumps(config)))) for config in (old, new))
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, before.get(name, ABSENT), after.get(name, ABSENT)) for name in names]
    return [
        Difference(name, was, now, ABSENT not in (was, now) and _is_fixed(name, fixed))
        for name, was, now in pairs
        if was != now
    ]


def _is_fixed(name: str, fixed: Collection[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in fixed for length in range(1, len(parts) + 1))


def _settings(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings under names such as `model.parallel.remat`; lists of configs are numbered."""
    if isinstance(config, list) and any(isinstance(element, dict) for element in config):
        config = dict(enumerate(config))
    if not isinstance(config, dict):
        yield name, config
        return
    for key, value in config.items():
        yield from _settings(value, f"{name}.{key}" if name else str(key))
