"""Find the run that a command line names."""

import argparse
from pathlib import Path

from xlstm_jax.configs import ConfigError

LATEST = "latest"
RUN_HELP = "the folder of a run; a folder of runs, such as outputs/demo, for the latest of them; or `latest`"


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--outputs`, the folder that `latest` searches."""
    parser.add_argument(
        "--outputs",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="the folder that `latest` searches; by default, outputs",
    )


def checkpoint_step(text: str) -> int:
    """Read a step from the command line, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: give a number; `xlstm-jax checkpoints` lists them")
    return int(text)


def find_run(name: str, outputs: Path) -> Path:
    """Return the folder of the run that was named on the command line.

    Args:
        name: The folder of a run; a folder with runs below it, for the latest of them; or `latest`.
        outputs: The folder that `latest` searches.

    Raises:
        ConfigError: There is no run.
    """
    from xlstm_jax.recipes.run import find_latest, is_run

    if name == LATEST:
        return find_latest(outputs)
    folder = Path(name)
    if folder.is_file():
        raise ConfigError(f"{name} is a file: give the folder of a run, or `latest`.")
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {name}: give the folder of a run, or `latest`.")
    return folder if is_run(folder) else find_latest(folder)
