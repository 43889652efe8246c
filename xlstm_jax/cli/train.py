"""Train a run in this process, or launch a sweep through Hydra, here or as SLURM jobs."""

import argparse
import contextlib
import gc
import logging
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xlstm_jax.cli.shared.gpu_memory import set_memory_fraction
from xlstm_jax.cli.shared.interrupts import exit_on_ctrl_c
from xlstm_jax.cli.shared.screen import as_command, as_typed, describe_error, print_error, print_out
from xlstm_jax.cli.shared.sweep_table import SweepRun, describe_sweep
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import (
    GROUPS_FOLDER,
    ROOT,
    Composition,
    compose_run,
    free_keys,
    groups,
    register_run_id,
    register_scaled_steps,
    search_path,
)

if TYPE_CHECKING:
    from xlstm_jax.recipes.run_config import RunConfig

WRONG_SETTING = 2
EXIT_CODES = {"nan": 3, "skipped": 4}
"""The exit code of a training run by its final status, if that is not `success`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        action=_Help,
        metavar="GROUP",
        help="show this help and exit; with a GROUP, show its choices and settings",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="group=choice|key=value", help="the settings of the run, in Hydra's syntax"
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="run a sweep: key=1,2 trains one run per value")
    parser.add_argument("-c", "--cfg", choices=("job", "hydra", "all"), help="print the composed settings and exit")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with your own groups and choices")
    parser.epilog = _describe_groups()


class _Help(argparse.Action):
    """Print the help of the command or, with a value, of a group of settings, and exit."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Print and exit."""
        if values is None:
            parser.print_help()
            parser.exit()
        from xlstm_jax.cli.settings import describe_group

        try:
            print_out(describe_group(values.partition("=")[0]))
        except ConfigError as error:
            parser.error(str(error))
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Compose and check the settings, then train the run or the sweep, and return the exit code."""
    begin_startup("train")
    if args.cfg and args.multirun:
        print_error("--cfg prints the settings of one run: leave out -m.")
        return WRONG_SETTING
    register_run_id()
    register_scaled_steps()
    try:
        if args.cfg:
            sys.stdout.write(compose_run(args.overrides, args.config_dir).to_yaml(args.cfg))
            return 0
        return (_sweep if args.multirun else _train_one)(args.overrides, args.config_dir)
    except ConfigError as error:
        print_error(str(error))
        return WRONG_SETTING


def begin_startup(command: str) -> None:
    """Start measuring the startup time: from the start of the process if it was started for this command."""
    from xlstm_jax.utils.startup import STARTUP, seconds_since_process_start

    STARTUP.begin(seconds_since_process_start() if sys.argv[1:2] == [command] else 0.0)
    import xlstm_jax.cli.shared.header
    import xlstm_jax.recipes.sweep  # noqa: F401 - measure the imports of settings and header here, with all others

    STARTUP.end("imports")


def _train_one(overrides: Sequence[str], config_dir: Path | None) -> int:
    """Train one run in this process and return its exit code."""
    from hydra.core.utils import configure_log

    from xlstm_jax.recipes.rejected import make_folder
    from xlstm_jax.recipes.run_config import build_run

    composition = compose_run(overrides, config_dir)
    hydra = composition.config.hydra
    only_in_sweeps = {"callbacks": hydra.callbacks, "output_subdir": hydra.output_subdir, "job.chdir": hydra.job.chdir}
    for name, value in (only_in_sweeps | {"job.env_set": hydra.job.env_set}).items():
        if value:
            raise ConfigError(f"hydra.{name} has no effect on a single run, only in a sweep: add -m, or leave it out.")
    config = build_run(composition.resolved)
    folder = composition.folder.absolute()
    make_folder(composition.folder)
    configure_log(hydra.job_logging, hydra.verbose)
    for sentence in composition.remarks:
        print_out(sentence)
    with composition.current():
        return train_in(folder, composition.settings, composition.notes(folder), config=config)


def _sweep(overrides: Sequence[str], config_dir: Path | None) -> int:
    """Check all runs of a sweep, launch them through Hydra, and return the highest of their exit codes."""
    from xlstm_jax.recipes.rejected import make_folder
    from xlstm_jax.recipes.run_config import build_run
    from xlstm_jax.recipes.sweep import compose_sweep

    folder, runs = compose_sweep(overrides, config_dir)
    for number, composition in enumerate(runs):
        try:
            build_run(composition.resolved)
        except ConfigError as error:
            raise ConfigError(f"Run {number} of the sweep: {error}") from error
    make_folder(folder)
    for sentence in dict.fromkeys(sentence for composition in runs for sentence in composition.remarks):
        print_out(sentence)
    words = [*search_path(config_dir), *free_keys(overrides, config_dir)]
    return _launch(words, [composition.settings for composition in runs])


def _launch(words: Sequence[str], runs: Sequence[dict[str, Any]]) -> int:
    """Launch the runs of a sweep through Hydra: sequentially in this process, or as jobs.

    Args:
        words: The overrides, in Hydra's syntax.
        runs: The settings of each run; empty if the sweeper chooses them during the sweep.
    """
    import hydra

    codes, ended = [0], []

    def train_job(config: Any) -> None:
        """Train one run of the sweep in the folder that Hydra created."""
        run, has_other_runs = _train_job(config, runs)
        ended.append(run)
        if has_other_runs and run.exit_code < 128:  # A signal ends the whole sweep.
            codes.append(run.exit_code)
        elif run.exit_code:
            raise SystemExit(run.exit_code)

    argv, messages = sys.argv, logging.getLogger("hydra")
    sys.argv = [argv[0], "--multirun", *words]
    handler = logging.StreamHandler(sys.stdout)  # Hydra logs which run starts next.
    messages.addHandler(handler)
    messages.setLevel(logging.INFO)
    try:
        hydra.main(config_path=str(GROUPS_FOLDER), config_name=ROOT, version_base="1.3")(train_job)()
    except SystemExit as stop:
        codes.append(stop.code if isinstance(stop.code, int) else 1)
    finally:
        sys.argv = argv
        messages.removeHandler(handler)
    if ended:  # Jobs of a launcher end in other processes.
        print_out(f"\n{describe_sweep(ended)}")
    return max(codes)


def _train_job(config: Any, runs: Sequence[dict[str, Any]]) -> tuple[SweepRun, bool]:
    """Train a run of a sweep; return it and whether this process also trains the other runs."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    whole: Any = HydraConfig.instance().cfg
    folder = Path(whole.hydra.runtime.output_dir)
    settings: Any = runs[whole.hydra.job.num] if runs else OmegaConf.to_container(config)
    notes = Composition(whole).notes(folder)
    run = SweepRun(folder, notes["overrides.yaml"], train_in(folder, settings, notes))
    return run, whole.hydra.launcher["_target_"].endswith(".BasicLauncher")


def train_in(
    folder: Path,
    settings: dict[str, Any],
    notes: Mapping[str, Any] | None = None,
    step: int = -1,
    config: "RunConfig | None" = None,
) -> int:
    """Train a run in a folder, resuming from its newest valid checkpoint if it has one, and return the exit code.

    Args:
        folder: The folder of the run.
        settings: The settings, with references resolved or not.
        notes: Hydra's records of this launch: file name to content.
        step: The step of the checkpoint to resume from, if not the newest valid one.
        config: The config of the run, if it has been built already.
    """
    from xlstm_jax.cli.shared.header import describe_end
    from xlstm_jax.trainer.run.signals import TrainingInterrupted
    from xlstm_jax.utils.startup import STARTUP

    if not STARTUP.is_running:  # the second run of a sweep, or a job
        STARTUP.begin()

    set_memory_fraction()  # A job of a launcher does not run `main`.
    # Libraries add their own handlers to the root logger; messages of `xlstm_jax` have their own handlers.
    logging.getLogger("xlstm_jax").propagate = False
    opened: Any = None
    try:
        with exit_on_ctrl_c(lambda: _describe_early_stop(folder)):
            while opened is None:
                opened = _train_if_it_fits(settings, folder, notes, step, config)
    except ConfigError as error:
        print_error(str(error))
        return WRONG_SETTING
    except RunFailedError as error:
        print_error(str(error))
    except TrainingInterrupted as stop:
        print_out(f"Stopped at step {stop.step} and saved a checkpoint. To resume:\n  {as_command('resume', folder)}")
        raise
    except KeyboardInterrupt:
        print_out(_describe_early_stop(folder))
        return 128 + signal.SIGINT
    finally:
        STARTUP.finish()
    if opened is None:
        gc.collect()  # Coroutines of an interrupted save warn if they are first collected at interpreter exit.
        return 1
    print_out(describe_end(opened))
    return EXIT_CODES.get(opened.trainer.status, 0)


def _train_if_it_fits(
    settings: dict[str, Any], folder: Path, notes: Mapping[str, Any] | None, step: int, config: "RunConfig | None"
) -> Any:
    """Open a run and train it; return `None` if its step did not fit into memory and another choice may fit."""
    from xlstm_jax.cli.shared.header import describe_start
    from xlstm_jax.recipes.run import open_run
    from xlstm_jax.trainer.base.compiled_step import StepDoesNotFitError
    from xlstm_jax.utils.startup import STARTUP

    with _errors_in_a_line(folder):
        opened = open_run(settings, folder, notes, step, config)
        try:
            opened.compile()
            print_out(describe_start(opened))
            STARTUP.end("header")
            opened.train()
        except StepDoesNotFitError as error:
            opened.close_without_room(error)
            return None
    return opened


def _describe_early_stop(folder: Path) -> str:
    from xlstm_jax.recipes.run import CONFIG_FILE

    stopped = "Stopped without saving."
    if (folder / CONFIG_FILE).is_file():
        return f"{stopped} Start again with:  {as_command('resume', folder)}"
    where = shlex.quote(f"hydra.run.dir={as_typed(folder)}")
    return f"{stopped} Start again with the same command, and in this folder with:  {where}"


class RunFailedError(Exception):
    """A problem with the data, a folder, the disk or a package that a run needs."""


@contextlib.contextmanager
def _errors_in_a_line(folder: Path) -> Iterator[None]:
    """Convert errors of data, folders and disks to one-line messages, unless HYDRA_FULL_ERROR is set."""
    from xlstm_jax.checkpoint.store import CheckpointNotWrittenError
    from xlstm_jax.trainer.callbacks.checkpointing import OtherSettingsError

    try:
        yield
    except ConfigError:
        raise
    except OtherSettingsError as error:
        raise ConfigError(f"{error.problem}: {as_command('train', '...', f'init_from={as_typed(folder)}')}") from error
    except (ImportError, OSError, ValueError, CheckpointNotWrittenError) as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        where = " (Set HYDRA_FULL_ERROR=1 for a traceback.)" if type(error) is ValueError else ""
        raise RunFailedError(describe_error(error) + where) from error


def _describe_groups() -> str:
    lines = ["groups and their choices (key=value overrides any field of a choice):"]
    for group, choices in groups().items():
        lines.append(f"\n  {group}=")
        lines += [f"    {choice:<16} {comment}" for choice, comment in choices.items()]
    lines += [
        "",
        "help on settings:",
        "  xlstm-jax train --help GROUP    list the choices and settings of a group",
        "  xlstm-jax settings KEY          describe a setting: type, default, description, and where it is set",
        "",
        "examples:",
    ]
    lines += [
        "  xlstm-jax train experiment=demo",
        "  xlstm-jax train data=text 'data.prepare.sources=[my.txt]' num_train_steps=2000",
        "  xlstm-jax train -m experiment=demo scheduler.lr=1e-3,3e-3",
        "  xlstm-jax train experiment=demo --cfg job",
    ]
    return "\n".join(lines)
