"""Go on with a run that was stopped, killed or is to be longer."""

import argparse

from xlstm_jax.cli.run_folders import RUN_HELP, add_outputs, find_run
from xlstm_jax.cli.screen import complain
from xlstm_jax.cli.train import WRONG_SETTING, begin_startup, train_in
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of the command."""
    parser.add_argument("run_folder", metavar="RUN", help=RUN_HELP)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings to change, such as num_train_steps")
    add_outputs(parser)


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
