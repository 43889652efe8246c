"""Compose all runs of a sweep before the first one starts."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from xlstm_jax.recipes.compose import Composition, compose_words, free_keys, hydra_errors, initialized, search_path


def compose_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[Path, list[Composition]]:
    """Compose the runs of a sweep.

    Args:
        overrides: As for `compose`; a list of values such as `1,2` gives one run per value.
        config_dir: As for `compose`.

    Returns:
        The folder of the sweep and its runs; no runs if a custom sweeper chooses them during the sweep.
    """
    with initialized(), hydra_errors():
        words = [*search_path(config_dir), *free_keys(overrides, config_dir)]
        first = compose_words(next(_points(words)))
        sweeper = first.config.hydra.sweeper
        if not sweeper["_target_"].endswith(".BasicSweeper"):
            return first.sweep_folder, []
        params = [f"{key}={value}" for key, value in (sweeper.params or {}).items()]
        runs = [compose_words(point, number) for number, point in enumerate(_points([*params, *words]))]
        return first.sweep_folder, runs


def _points(words: Sequence[str]) -> "itertools.product[tuple[str, ...]]":
    """Return the overrides of each run of a sweep, in the order of Hydra's basic sweeper."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    values: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides(list(words)):
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [str(override.input_line)]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            raise HydraException(
                f"A sweep takes lists of values, and does not support sweep type {override.input_line}."
            )
    return itertools.product(*values.values())
