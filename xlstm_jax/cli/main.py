"""Find the command that was asked for and run it.

Command `x` is the file `x.py` beside this one, with `add_arguments(parser)` and `run(args) -> exit code`. It is
imported only when it is asked for, so that `--help` and `--version` answer at once.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from xlstm_jax import __version__

COMMANDS = {
    "prepare": "tokenise texts once, into shards that training reads",
    "doctor": "check this machine: versions, devices, environment, extras",
}
"""Every command and what it does, in the order that `--help` shows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (by default, that of the process) and return its exit code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="xlstm-jax", description="xLSTM language models in JAX.")
    parser.add_argument("--version", action="version", version=f"xlstm-jax {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, summary in COMMANDS.items():
        command_parser = commands.add_parser(name, help=summary, description=f"xlstm-jax {name}: {summary}.")
        if argv[:1] == [name]:
            command = importlib.import_module(f"xlstm_jax.cli.{name}")
            command.add_arguments(command_parser)
            command_parser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
