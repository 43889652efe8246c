"""Which run is meant on the command line."""

import argparse
from pathlib import Path

from xlstm_jax.configs import ConfigError

LATEST = "latest"
RUN_HELP = "the folder of a run, a folder whose latest run is meant, such as outputs/demo, or `latest`"


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Describe where `latest` looks for runs."""
    parser.add_argument(
        "--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="where `latest` looks; by default, outputs"
    )


def checkpoint_step(text: str) -> int:
    """Read a step from the command line, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no step: give a number, as `xlstm-jax checkpoints` lists them")
    return int(text)


def find_run(name: str, outputs: Path) -> Path:
    """Return the folder of a run that was named on the command line.

    Args:
        name: The folder of a run, a folder with runs below it, of which the latest is meant, or `latest`.
        outputs: Where `latest` looks.

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
