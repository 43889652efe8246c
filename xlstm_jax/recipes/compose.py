"""Composition of settings by Hydra, from packaged groups, files of users and words of a command line."""

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigError, nearest

GROUPS_FOLDER = Path(__file__).parent / "groups"
ROOT = "train"
"""The file that all runs start from."""


def register_run_id() -> None:
    """Let settings refer to `${run_id:}`: the time or, in a SLURM step, what its processes and its restarts share."""
    from omegaconf import OmegaConf

    step = [os.environ.get(f"SLURM_{name}_ID") for name in ("JOB", "STEP")]
    run_id = f"slurm_{step[0]}_{step[1]}" if all(step) else datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)


def scaled_steps(
    num_steps: int, num_train_steps: int, minimum: int = 0, *, _parent_: Mapping[str, Any], _root_: Mapping[str, Any]
) -> int:
    """Return how many steps a part of the schedule has: the resolver of `${scaled:STEPS,OF_STEPS}`.

    A run that is shorter than the one that the numbers are meant for has fewer in proportion; a longer one has no more.

    Args:
        num_steps: The steps of this part in a run of `num_train_steps`.
        num_train_steps: The length of the run that the numbers are meant for.
        minimum: At least so many.
    """
    length = _parent_.get("decay_steps") or _root_.get("num_train_steps")
    if not isinstance(length, int) or not 0 < length < num_train_steps:  # What is no length is for the builder to say.
        return num_steps
    return max(minimum, num_steps * length // num_train_steps)


def register_scaled_steps() -> None:
    """Let settings refer to `${scaled:STEPS,OF_STEPS}`."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("scaled", scaled_steps, replace=True)


def groups() -> dict[str, dict[str, str]]:
    """Return all packaged groups with their choices, and the comment that each choice starts with."""
    return {
        group: {choice: _first_comment(path) for choice, path in choices.items()}
        for group, choices in choice_files().items()
    }


def choice_files() -> dict[str, dict[str, Path]]:
    """Return the files of all packaged choices, by group and by choice."""
    return {
        folder.name: {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        for folder in sorted(GROUPS_FOLDER.iterdir())
        if folder.is_dir()
    }


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Compose the settings of a run.

    Args:
        overrides: What to choose and to change, as on the command line: `group=choice`, `key=value`, `~key`.
        config_dir: A folder with more groups and choices, laid out as the packaged ones.

    Returns:
        Plain settings, with all references resolved.
    """
    from hydra import compose as hydra_compose

    words = [*search_path(config_dir), *free_keys(overrides, config_dir)]
    with initialized(), hydra_errors():
        return resolved(hydra_compose(ROOT, overrides=words))


def resolved(config: Any) -> dict[str, Any]:
    """Return plain settings from a config of Hydra, or from a dictionary, with all references resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    register_scaled_steps()
    try:
        config = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is not set: add {error.full_key}=... to the command.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error


def change(settings: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return settings with some values changed, as `key=value` on the command line; references stay what they are."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    wrong = [word for word in overrides if "=" not in word or word.startswith(("~", "+"))]
    if wrong:
        raise ConfigError(f"{wrong[0]!r} is no key=value.")
    try:
        changed = OmegaConf.merge(OmegaConf.create(dict(settings)), OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_container(changed)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error)) from error


def free_keys(overrides: Sequence[str], config_dir: Path | None = None) -> list[str]:
    """Let overrides set fields that no file mentions: whether there is such a field is for the builder to say."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, freed = OverridesParser.create(), []
    for word in overrides:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            raise ConfigError(f"{word!r} is no key=value or group=choice: {_one_line(error)}") from error
        key = override.key_or_group
        if not key:
            raise ConfigError(f"{word!r} is no key=value or group=choice: there is nothing before the sign.")
        is_plain = not (override.is_add() or override.is_force_add() or override.is_delete())
        choices = _choices(key, config_dir)
        if is_plain and choices:
            _check_choice(key, override.value(), choices)
        is_value = not key.startswith("hydra") and not choices
        freed.append(f"++{word}" if is_plain and is_value else word)
    return freed


def search_path(config_dir: Path | None) -> list[str]:
    """Return the overrides that let Hydra look into a folder of the user too."""
    if config_dir is None:
        return []
    if not config_dir.is_dir():
        raise ConfigError(f"--config-dir: there is no folder {config_dir}.")
    return [f"hydra.searchpath=[file://{config_dir.resolve()}]"]


@contextlib.contextmanager
def initialized() -> Iterator[None]:
    """Let Hydra find the packaged groups."""
    from hydra import initialize_config_dir

    with initialize_config_dir(config_dir=str(GROUPS_FOLDER), version_base="1.3"):
        yield


@contextlib.contextmanager
def hydra_errors() -> Iterator[None]:
    """Say in a line what Hydra cannot compose."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from error


def _choices(group: str, config_dir: Path | None) -> list[str]:
    folders = [folder / group for folder in (GROUPS_FOLDER, config_dir) if folder is not None]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _check_choice(group: str, value: Any, choices: Sequence[str]) -> None:
    """Say in a line that a group has no such choice; what is no plain name is for Hydra to judge."""
    if value is None:
        raise ConfigError(f"{group}: a choice is needed, not null: {', '.join(choices)}; or ~{group} for none.")
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and name not in choices:
            raise ConfigError(f"{group}: there is no {name!r}, only {', '.join(choices)}.{nearest(name, choices)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace("'++", "'").split())  # Users write no sign before what they set.


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = (line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")
