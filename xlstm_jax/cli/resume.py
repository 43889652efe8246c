"""Resume a run that was stopped or killed, or train it for longer."""

import argparse

from xlstm_jax.cli.shared.run_folders import RUN_HELP, add_outputs, checkpoint_step, find_run
from xlstm_jax.cli.shared.screen import print_error
from xlstm_jax.cli.train import WRONG_SETTING, begin_startup, train_in
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_folder", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings to change, such as num_train_steps"
    )
    parser.add_argument(
        "--step",
        type=checkpoint_step,
        default=-1,
        metavar="N",
        help="the checkpoint to resume from; by default, the newest",
    )
    add_outputs(parser)


def run(args: argparse.Namespace) -> int:
    """Resume the run and return the exit code."""
    from xlstm_jax.recipes.run import read_settings

    begin_startup("resume")
    try:
        folder = find_run(args.run_folder, args.outputs)
        settings = change(read_settings(folder), args.overrides)
    except ConfigError as error:
        print_error(str(error))
        return WRONG_SETTING
    return train_in(folder.resolve(), settings, step=args.step)
