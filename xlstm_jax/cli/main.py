"""Find the command that was asked for and run it.

Command `x` is the file `x.py` beside this one, with `add_arguments(parser)` and `run(args) -> exit code`. It is
imported only when it is asked for, so that `--help` and `--version` answer at once.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from xlstm_jax.cli.gpu_memory import set_memory_fraction
from xlstm_jax.cli.interrupts import exit_on_ctrl_c
from xlstm_jax.version import __version__

COMMANDS = {
    "train": "train a model: group=choice and key=value compose the run",
    "resume": "resume a run that was stopped, or train it for longer",
    "checkpoints": "list the checkpoints of a run, and verify them",
    "generate": "let a trained model continue texts",
    "settings": "list the settings of a run, with types, defaults and descriptions",
    "report": "draw the curves of one run, or of several, on a page",
    "prepare": "tokenise texts once, into shards that training reads",
    "plan": "tell before a run what it needs: memory, time, sharding",
    "bench": "run benchmarks and keep their results",
    "doctor": "check this machine: versions, devices, kernels, disk",
}
"""Every command and what it does, in the order that `--help` shows."""
USES_DEVICES = {"train", "resume", "checkpoints", "generate", "plan", "bench", "doctor"}
"""The commands that may start JAX."""

EXIT_CODES = (
    "exit codes: 0 done; 1 an error; 2 a wrong command or setting; 3 training ended at a bad step; 4 too many "
    "steps were skipped; 75 a run hung; "
    "130 and 143 stopped by Ctrl-C or SIGTERM, a run is saved; 141 nobody reads what is printed"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (by default, that of the process) and return its exit code."""
    try:
        try:
            with exit_on_ctrl_c():
                return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write("Stopped.\n")
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Python writes what is left at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="xlstm-jax", description="xLSTM language models in JAX.", epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"xlstm-jax {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    chosen = parser
    for name, summary in COMMANDS.items():
        command_parser = commands.add_parser(
            name,
            help=summary,
            description=f"xlstm-jax {name}: {summary}.",
            conflict_handler="resolve",  # `train` has a --help of its own
        )
        if argv[:1] == [name]:
            command = importlib.import_module(f"xlstm_jax.cli.{name}")
            command.add_arguments(command_parser)
            command_parser.set_defaults(run=command.run)
            chosen = command_parser
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        chosen.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes only those words for settings that stand before the first option
        args.overrides += rest
    if argv[:1] and argv[0] in USES_DEVICES:
        set_memory_fraction()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
