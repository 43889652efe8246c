"""Composition of settings with Hydra, from packaged groups, user files and command-line overrides."""

import contextlib
import dataclasses
import datetime
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from xlstm_jax.configs import ConfigError, nearest
from xlstm_jax.configs.reader import TARGET

GROUPS_FOLDER = Path(__file__).parent / "groups"
ROOT = "train"
"""The root config of all runs."""
CONFIG_FILE = "config.yaml"
"""The file in the folder of a run that holds its settings with all references resolved."""

CALLBACKS = "callbacks"
"""The group that allows several choices at once."""


def register_run_id() -> None:
    """Register the resolver `${run_id:}`: the time or, in a SLURM step, an id shared by its processes and restarts."""
    from omegaconf import OmegaConf

    step = [os.environ.get(f"SLURM_{name}_ID") for name in ("JOB", "STEP")]
    run_id = f"slurm_{step[0]}_{step[1]}" if all(step) else datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    OmegaConf.register_new_resolver("run_id", lambda: run_id, replace=True)


def scaled_steps(
    num_steps: int, num_train_steps: int, minimum: int = 0, *, _parent_: Mapping[str, Any], _root_: Mapping[str, Any]
) -> int:
    """Return the length of a schedule phase such as the warm-up: the resolver `${scaled:STEPS,OF_STEPS}`.

    The length shrinks in proportion for runs shorter than `num_train_steps`; it does not grow for longer ones.

    Args:
        num_steps: The length of the phase in a run of `num_train_steps`.
        num_train_steps: The length of the run for which `num_steps` was chosen.
        minimum: The minimum length of the phase.
    """
    length = _parent_.get("decay_steps") or _root_.get("num_train_steps")
    if not isinstance(length, int) or not 0 < length < num_train_steps:  # The builder reports invalid lengths.
        return num_steps
    return max(minimum, num_steps * length // num_train_steps)


def register_scaled_steps() -> None:
    """Register the resolver `${scaled:STEPS,OF_STEPS}`."""
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("scaled", scaled_steps, replace=True)


def groups() -> dict[str, dict[str, str]]:
    """Return all packaged groups with their choices and the first comment of each choice."""
    return {
        group: {choice: _first_comment(path) for choice, path in choices.items()}
        for group, choices in choice_files().items()
    }


@functools.cache
def choice_files() -> dict[str, dict[str, Path]]:
    """Return the files of all packaged choices, by group and by choice."""
    return {
        folder.name: {path.stem: path for path in sorted(folder.glob("*.yaml"))}
        for folder in sorted(GROUPS_FOLDER.iterdir())
        if folder.is_dir()
    }


@dataclasses.dataclass(frozen=True)
class Composition:
    """The settings of a run, composed by Hydra."""

    config: Any
    """Hydra's config: the settings, and Hydra's own under `hydra`."""
    remarks: tuple[str, ...] = ()
    """One sentence per group whose settings differ from what the user chose and set, such as dropped overrides."""

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The settings with unresolved references."""
        from omegaconf import OmegaConf

        return OmegaConf.to_container(self._without_hydra())  # pyright: ignore[reportReturnType]

    @functools.cached_property
    def resolved(self) -> dict[str, Any]:
        """The settings with all references resolved."""
        with self.current():
            return resolved(self._without_hydra())

    @functools.cached_property
    def folder(self) -> Path:
        """The folder of the run."""
        with self.current(), hydra_errors():
            return Path(self.config.hydra.run.dir)

    @functools.cached_property
    def sweep_folder(self) -> Path:
        """The folder of a sweep, if the run is part of one."""
        with self.current(), hydra_errors():
            return Path(self.config.hydra.sweep.dir)

    def to_yaml(self, part: Literal["job", "hydra", "all"]) -> str:
        """Return as YAML the settings of the run (`job`, with references resolved), those of Hydra, or both."""
        from omegaconf import OmegaConf

        with self.current(), hydra_errors():
            if part == "job":
                return OmegaConf.to_yaml(self._without_hydra(), resolve=True)
            return OmegaConf.to_yaml(self.config if part == "all" else OmegaConf.masked_copy(self.config, ["hydra"]))

    def _without_hydra(self) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.masked_copy(self.config, [name for name in self.config if name != "hydra"])

    def notes(self, folder: Path) -> dict[str, Any]:
        """Return Hydra's records of the launch, saved in the folder of the run: file name to content."""
        from omegaconf import OmegaConf

        hydra: Any = OmegaConf.to_container(OmegaConf.masked_copy(self.config, ["hydra"]), enum_to_str=True)
        hydra["hydra"]["runtime"]["output_dir"] = str(folder)
        return {"hydra.yaml": hydra, "overrides.yaml": hydra["hydra"]["overrides"]["task"]}

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make `${hydra:...}` resolve to this composition within the context."""
        from hydra.core.hydra_config import HydraConfig

        instance = HydraConfig.instance()
        before = instance.cfg
        instance.set_config(self.config)
        try:
            yield
        finally:
            instance.cfg = before


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """Compose the settings of a run.

    Args:
        overrides: Command-line overrides: `group=choice`, `key=value`, `~key`.
        config_dir: A folder with more groups and choices, laid out like the packaged ones.

    Returns:
        Plain settings with all references resolved.
    """
    return compose_run(overrides, config_dir).resolved


def compose_run(overrides: Sequence[str], config_dir: Path | None = None) -> Composition:
    """Compose a run; the arguments are those of `compose`."""
    with initialized(), hydra_errors():
        return compose_words([*search_path(config_dir), *free_keys(overrides, config_dir)])


def compose_words(words: Sequence[str], job_number: int | None = None) -> Composition:
    """Compose a run from Hydra overrides, within the context of `initialized`.

    An experiment selects choices of groups and overrides settings of these choices. If the command line selects another
    choice for a group, the experiment's overrides for that group are dropped. A run with `init_from` that selects
    neither a model nor an experiment uses the model settings of the run it starts from.

    Args:
        words: The overrides, as `free_keys` returns them.
        job_number: The number of the run in its sweep, if it is part of one.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict

    config, remarks = _load(words), []
    chosen, experiments = _chosen_groups(words)
    if chosen and experiments:
        before = _load(experiments).hydra.runtime.choices
        after = config.hydra.runtime.choices
        switched = [group for group in chosen if group == CALLBACKS or after.get(group) != before.get(group)]
        alone = _load([word for word in words if _is_for_choices(word, switched)]) if switched else config
        for group in switched:
            section = _section_of_choice(group, *(OmegaConf.to_container(each[group]) for each in (config, alone)))
            lost = set(_leaves(OmegaConf.to_container(config[group]), group)) - set(_leaves(section, group))
            if lost:
                names = ", ".join(sorted({key for key, _ in lost}))
                remarks.append(f"{chosen[group]} replaces the choice of the experiment, and drops its {names}.")
            with open_dict(config):
                config[group] = section
    if "model" not in chosen and not experiments and (inherited := _model_of(config.get("init_from"))) is not None:
        remarks.append(f"The settings of the model are those of {config.init_from}, whose parameters it starts from.")
        with open_dict(config):
            config["model"] = inherited
            _apply(config, [word for word in words if word.lstrip("+~").startswith("model.")])
    with open_dict(config):
        config.hydra.mode = RunMode.RUN
        if job_number is not None:
            config.hydra.job.id, config.hydra.job.num, config.hydra.mode = str(job_number), job_number, RunMode.MULTIRUN
    return Composition(config, tuple(remarks))


def _load(words: Sequence[str]) -> Any:
    from hydra import compose as hydra_compose

    return hydra_compose(ROOT, overrides=list(words), return_hydra_config=True)


def _chosen_groups(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the overrides that select a choice, by group, and those needed to compose the experiment alone."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    chosen, experiments = {}, []
    for word, override in zip(words, OverridesParser.create().parse_overrides(list(words)), strict=True):
        key = override.key_or_group
        if key in ("experiment", "hydra.searchpath"):
            experiments.append(word)
        elif key in choice_files() and key not in ("launcher", "experiment") and not override.is_delete():
            chosen[key] = word
    return chosen, experiments if any(word.startswith("experiment=") for word in experiments) else []


def _model_of(run: str | None) -> dict[str, Any] | None:
    """Return the settings of the model of a run, with all references resolved; `None` if there is no such run."""
    file = Path(run or "") / CONFIG_FILE
    if not run or not file.is_file():  # Loading its parameters fails with the reason.
        return None
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"init_from: {file} is not valid YAML: {' '.join(str(error).split())}") from error
    return settings.get("model") if isinstance(settings, dict) else None


def _apply(config: Any, words: Sequence[str]) -> None:
    """Apply overrides of values to a config of Hydra."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    for override in OverridesParser.create().parse_overrides(list(words)):
        section, _, name = override.key_or_group.rpartition(".")
        if override.is_delete():
            OmegaConf.select(config, section).pop(name, None)
        else:
            OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)


def _is_for_choices(word: str, switched: Sequence[str]) -> bool:
    """Return whether an override also applies without the experiment; the key of a `~key` may exist only with it."""
    if word.startswith("~"):
        return word[1:].partition("=")[0].partition(".")[0] in switched
    return not word.startswith("experiment=")


def _section_of_choice(group: str, whole: Any, alone: Any) -> Any:
    """Return a section without the settings that an experiment made for another choice.

    Callbacks are a list of choices, each with its own entries: entries of choices that are still selected keep the
    experiment's settings, as do entries that the experiment defines. An entry without `_target_` is left over from a
    dropped choice.
    """
    if group != CALLBACKS:
        return alone
    return {
        name: entry for name, entry in whole.items() if name in alone or not isinstance(entry, dict) or TARGET in entry
    }


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield the dotted names and values of all settings of a section, as text."""
    for name, value in (section or {}).items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", str(value)


def resolved(config: Any) -> dict[str, Any]:
    """Convert a Hydra config or a dictionary to plain settings with all references resolved."""
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
    """Return settings with `key=value` overrides applied; references stay unresolved."""
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
    """Prefix overrides with `++`, so that they may set fields that no file mentions; the builder rejects unknown ones.

    Raises:
        ConfigError: An override is malformed, or a group has no such choice.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, freed = OverridesParser.create(), []
    for word in overrides:
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            meant = _suggest_choice(word) or f": {_one_line(error)}"
            raise ConfigError(f"{word!r} is no key=value or group=choice{meant}") from error
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


def _suggest_choice(word: str) -> str:
    """Return a question that suggests `group=choice` for a word that is the name of a choice; empty if it is not."""
    choices = [(group, choice) for group in ("experiment", *choice_files()) for choice in choice_files()[group]]
    group = next((group for group, choice in choices if choice == word), None)
    return f". Did you mean {f'{group}={word}'!r}?" if group else ""


def search_path(config_dir: Path | None) -> list[str]:
    """Return the override that adds a user folder to Hydra's search path."""
    if config_dir is None:
        return []
    if not config_dir.is_dir():
        raise ConfigError(f"--config-dir: there is no folder {config_dir}.")
    return [f"hydra.searchpath=[file://{config_dir.resolve()}]"]


@contextlib.contextmanager
def initialized() -> Iterator[None]:
    """Initialise Hydra with the packaged groups within the context."""
    from hydra import initialize_config_dir

    with initialize_config_dir(config_dir=str(GROUPS_FOLDER), version_base="1.3"):
        yield


@contextlib.contextmanager
def hydra_errors() -> Iterator[None]:
    """Convert errors of Hydra to a one-line `ConfigError`."""
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
    """Raise a `ConfigError` if a group has no such choice; anything but a plain name is left to Hydra."""
    if value is None:
        raise ConfigError(f"{group}: a choice is needed, not null: {', '.join(choices)}; or ~{group} for none.")
    for name in value if isinstance(value, list) else [value]:
        if isinstance(name, str) and name not in choices:
            raise ConfigError(f"{group}: there is no {name!r}, only {', '.join(choices)}.{nearest(name, choices)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).replace("'++", "'").split())  # Hide the prefix that `free_keys` added.


def _first_comment(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = (line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")
