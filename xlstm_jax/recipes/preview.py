"""What Hydra is about to run and where, before it makes a folder."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import ROOT, free_keys, hydra_errors, initialized, resolved, search_path


def preview_run(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the settings of a run; the arguments are those of `compose`."""
    from hydra.types import RunMode

    with initialized(), hydra_errors():
        config = _load(overrides, config_dir, RunMode.RUN)
        with _current(config):
            return Path(config.hydra.run.dir), _settings(config)


def preview_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of a sweep and the settings of each of its runs; none where only its sweeper knows them."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    with initialized(), hydra_errors():
        sweep = _load(overrides, config_dir, RunMode.MULTIRUN)
        loader = GlobalHydra.instance().config_loader()
        runs = []
        for number, point in enumerate(_points(sweep, loader)):
            config = loader.load_sweep_config(sweep, point)
            with _current(config, number):
                runs.append(_settings(config))
        with _current(sweep):
            return Path(sweep.hydra.sweep.dir), runs


def _load(overrides: Sequence[str], config_dir: Path | None, mode: Any) -> Any:
    from hydra.core.global_hydra import GlobalHydra

    words = [*search_path(config_dir), *free_keys(overrides, config_dir)]
    hydra: Any = GlobalHydra.instance().hydra
    return hydra.compose_config(config_name=ROOT, overrides=words, run_mode=mode)


def _points(sweep: Any, loader: Any) -> list[list[str]]:
    """Return the overrides of each run of a sweep, as Hydra's own sweeper makes them."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    sweeper = sweep.hydra.sweeper
    if not sweeper["_target_"].endswith(f".{BasicSweeper.__name__}"):
        return []
    given: Any = OmegaConf.to_container(sweep.hydra.overrides.task)  # references are for each run to resolve
    words = [*(f"{key}={value}" for key, value in (sweeper.params or {}).items()), *given]
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(words)
    return BasicSweeper.split_arguments(parsed, None)[0]


@contextlib.contextmanager
def _current(config: Any, number: int | None = None) -> Iterator[None]:
    """Let settings refer to `${hydra:...}`, as they may in a run."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import open_dict

    if number is not None:
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(number), number
    instance = HydraConfig.instance()
    before = instance.cfg
    instance.set_config(config)
    try:
        yield
    finally:
        instance.cfg = before


def _settings(config: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return resolved(OmegaConf.masked_copy(config, [name for name in config if name != "hydra"]))


def make_folder(folder: Path) -> None:
    """Make a folder, as Hydra does; that it cannot be made is a setting to change."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"The folder {folder} cannot be made ({error.strerror}): choose another one.") from error
