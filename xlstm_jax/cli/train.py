"""Train a model: Hydra composes the run, and starts it here, once for each point of a sweep, or as SLURM jobs."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xlstm_jax.cli.screen import as_typed, complain, show
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import GROUPS_FOLDER, ROOT, compose, free_keys, groups, register_run_id, search_path

BAD_STEP, WRONG_SETTING = 3, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "overrides", nargs="*", metavar="group=choice|key=value", help="what the run is made of, as Hydra takes it"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: key=1,2 is a run for each value")
    parser.add_argument(
        "-c", "--cfg", choices=("job", "hydra", "all"), help="print the settings that a run would have, and leave"
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with groups and choices of your own")
    parser.epilog = _describe_groups()


def run(args: argparse.Namespace) -> int:
    """Check the settings, then let Hydra start the run, or the runs."""
    overrides: list[str] = args.overrides
    if args.cfg and args.multirun:
        complain("--cfg prints the settings of one run: leave out -m.")
        return WRONG_SETTING
    try:
        words = [*search_path(args.config_dir), *free_keys(overrides, args.config_dir)]
        if args.cfg is None and not args.multirun:
            # Before Hydra makes a folder for it.
            from xlstm_jax.recipes.run_config import build_run

            build_run(compose(overrides, args.config_dir))
    except ConfigError as error:
        complain(str(error))
        return WRONG_SETTING
    options = ["--multirun"] * args.multirun + (["--cfg", args.cfg] if args.cfg else [])
    options += ["--resolve"] * (args.cfg == "job")  # by itself, Hydra's part lacks what it refers to
    return _call_hydra([*options, *words])


def _call_hydra(words: Sequence[str]) -> int:
    import hydra

    register_run_id()
    argv, messages = sys.argv, logging.getLogger("hydra")
    sys.argv = [argv[0], *words]
    handler = logging.StreamHandler(sys.stdout)  # which run of a sweep is next
    messages.addHandler(handler)
    messages.setLevel(logging.INFO)
    try:
        hydra.main(config_path=str(GROUPS_FOLDER), config_name=ROOT, version_base="1.3")(train_one)()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    finally:
        sys.argv = argv
        messages.removeHandler(handler)
    return 0


def train_one(config: Any) -> None:
    """Train one run that Hydra has composed, in the folder that it has made."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    folder = Path(HydraConfig.get().runtime.output_dir)
    settings: Any = OmegaConf.to_container(config)
    if code := train_in(folder, settings):
        raise SystemExit(code)


def train_in(folder: Path, settings: dict[str, Any]) -> int:
    """Train a run in a folder, from its latest checkpoint if it has one, and return the exit code.

    Args:
        folder: The folder of the run.
        settings: The settings, with references between them or without.
    """
    from xlstm_jax.cli.header import describe_end, describe_start
    from xlstm_jax.trainer.base.signals import TrainingInterrupted

    # Libraries give the root logger handlers of theirs; what is said here has its own.
    logging.getLogger("xlstm_jax").propagate = False
    resume = f"xlstm-jax resume {as_typed(folder)}"
    try:
        opened = _open(settings, folder)
        show(describe_start(opened))
        opened.train()
    except ConfigError as error:
        complain(str(error))
        return WRONG_SETTING
    except CannotOpenError as error:
        complain(str(error))
        return 1
    except TrainingInterrupted as stop:
        show(f"Stopped at step {stop.step}, and saved. Go on with:  {resume}")
        raise
    except KeyboardInterrupt:
        show(f"Stopped before the first step. Begin again with:  {resume}")
        return 128 + signal.SIGINT
    show(describe_end(opened))
    return BAD_STEP if opened.trainer.status == "nan" else 0


class CannotOpenError(Exception):
    """The data, a folder or a package of a run is not as it has to be."""


def _open(settings: dict[str, Any], folder: Path) -> Any:
    """Open a run; what is wrong with its data or its folder is said in a line, unless HYDRA_FULL_ERROR is set."""
    from xlstm_jax.recipes.run import open_run

    try:
        return open_run(settings, folder)
    except ConfigError:
        raise
    except (ImportError, OSError, ValueError) as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        raise CannotOpenError(f"{type(error).__name__}: {error}") from error


def _describe_groups() -> str:
    lines = ["groups and their choices (key=value changes any field of a choice):"]
    for group, choices in groups().items():
        lines.append(f"\n  {group}=")
        lines += [f"    {choice:<16} {comment}" for choice, comment in choices.items()]
    lines += ["", "examples:"]
    lines += [
        "  xlstm-jax train experiment=demo",
        "  xlstm-jax train data=text 'data.prepare.sources=[my.txt]' num_train_steps=2000",
        "  xlstm-jax train -m experiment=demo scheduler.lr=1e-3,3e-3",
        "  xlstm-jax train experiment=demo --cfg job",
    ]
    return "\n".join(lines)
