"""Labels of compared runs: their names and the settings in which they differ."""

import dataclasses
from collections.abc import Sequence

from xlstm_jax.report.run_files import CONFIG_FILES, Run
from xlstm_jax.report.summary import config_differences

MOST_SETTINGS = 3
LONGEST_VALUE = 24


def with_labels(runs: Sequence[Run]) -> list[Run]:
    """Label runs by the name in their settings and the first few settings that differ.

    Args:
        runs: Several runs, named after their folders.

    Returns:
        The runs with labels as names. If labels are not unique, the folder is added.
    """
    differences = {key: values for key, values in config_differences(runs).items() if key != "name"}
    shown = list(differences)[:MOST_SETTINGS]
    short = [key.rpartition(".")[2] for key in shown]
    keys = [name if short.count(name) == 1 else key for key, name in zip(shown, short, strict=True)]
    labels = []
    for index, run in enumerate(runs):
        settings = [f"{name}={_shortened(differences[key][index])}" for key, name in zip(shown, keys, strict=True)]
        name = run.configs.get(CONFIG_FILES[0], {}).get("name")
        labels.append(" · ".join([name if isinstance(name, str) else run.name, *settings]))
    return [
        dataclasses.replace(run, name=label if labels.count(label) == 1 else f"{label} ({run.name})")
        for run, label in zip(runs, labels, strict=True)
    ]


def _shortened(value: str | None) -> str:
    text = "–" if value is None else value
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
