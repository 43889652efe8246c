"""The entry point of `xlstm-jax`: parse the command line and run the requested command.

Command `x` is the module `x.py` in this folder, with `add_arguments(parser)` and `run(args) -> exit code`. It is
imported only when requested, so that `--help` and `--version` are fast.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from xlstm_jax.cli.shared.gpu_memory import set_memory_fraction
from xlstm_jax.cli.shared.interrupts import exit_on_ctrl_c
from xlstm_jax.version import __version__

COMMANDS = {
    "train": "train a model: group=choice and key=value compose the run",
    "resume": "resume a run that was stopped, or train it for longer",
    "checkpoints": "list the checkpoints of a run, and verify them",
    "generate": "generate text from a trained model",
    "settings": "list the settings of a run, with types, defaults and descriptions",
    "report": "write an HTML page with the curves of one or several runs",
    "prepare": "tokenise texts once into shards for training",
    "plan": "estimate what a run needs before it starts: memory, time, sharding",
    "bench": "run benchmarks and save their results",
    "doctor": "check this machine: versions, devices, kernels, disk",
}
"""All commands with their summaries, in the order of `--help`."""
USES_DEVICES = {"train", "resume", "checkpoints", "generate", "plan", "bench", "doctor"}
"""The commands that may start JAX."""

EXIT_CODES = (
    "exit codes: 0 success; 1 error; 2 wrong command or setting; 3 training stopped at a bad step; 4 too many bad "
    "steps were skipped; 75 the run hung; "
    "130 and 143 stopped by Ctrl-C or SIGTERM (training saves a checkpoint first); 141 broken pipe"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (by default, the arguments of the process) and return its exit code."""
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
        # Python flushes stdout again at exit, which would raise a second error.
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
            conflict_handler="resolve",  # `train` defines its own --help
        )
        if argv[:1] == [name]:
            command = importlib.import_module(f"xlstm_jax.cli.{name}")
            command.add_arguments(command_parser)
            command_parser.set_defaults(run=command.run)
            chosen = command_parser
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(word.startswith("-") for word in rest)):
        chosen.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse assigns only the settings before the first option to `overrides`
        args.overrides += rest
    if argv[:1] and argv[0] in USES_DEVICES:
        set_memory_fraction()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
