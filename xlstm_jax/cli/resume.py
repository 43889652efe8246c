"""Go on with a run that was stopped, killed or is to be longer."""

import argparse
from pathlib import Path

from xlstm_jax.cli.screen import complain
from xlstm_jax.cli.train import WRONG_SETTING, begin_startup, train_in
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import change

LATEST = "latest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run, or `latest`")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as num_train_steps")
    add_outputs(parser)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Describe where `latest` looks for runs."""
    parser.add_argument(
        "--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="where `latest` looks; by default, outputs"
    )


def find_run(run_folder: str, outputs: Path) -> Path:
    """Return the folder of a run that was named on the command line."""
    from xlstm_jax.recipes.run import find_latest

    return find_latest(outputs) if run_folder == LATEST else Path(run_folder)


def run(args: argparse.Namespace) -> int:
    """Go on, and return the exit code."""
    from xlstm_jax.recipes.run import read_settings

    begin_startup("resume")
    try:
        folder = find_run(args.run_folder, args.outputs)
        settings = change(read_settings(folder), args.overrides)
    except ConfigError as error:
        complain(str(error))
        return WRONG_SETTING
    return train_in(folder.resolve(), settings)
