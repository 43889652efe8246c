"""Estimate what a run needs before it starts: parameters, memory, FLOPs, time and the sharding of each parameter."""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from xlstm_jax.cli.shared.screen import as_command, describe_error, print_error, print_out
from xlstm_jax.configs import ConfigError
from xlstm_jax.recipes.compose import compose

GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "overrides", nargs="*", metavar="group=choice|key=value", help="the settings, as for `xlstm-jax train`"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="the number of devices; by default, all on this machine"
    )
    parser.add_argument(
        "--accelerator", metavar="NAME", help="the device to plan for, such as h100; by default, that of this machine"
    )
    parser.add_argument(
        "--target-memory", type=float, metavar="GIB", help="find the cheapest remat, accumulation and mesh that fit"
    )
    parser.add_argument(
        "--max-compilations", type=int, default=8, metavar="N", help="compile at most this many candidates"
    )
    parser.add_argument(
        "--no-compile",
        action="store_true",
        help="do not compile the step for the devices of this machine: faster, but memory is only estimated",
    )
    parser.add_argument("--sharding", action="store_true", help="list the sharding of every parameter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to this file")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="a folder with your own groups and choices")


def run(args: argparse.Namespace) -> int:
    """Make the plan, print it and return the exit code."""
    try:
        _check(args)
        settings = compose(args.overrides, args.config_dir)
        return _plan(settings, args)
    except ConfigError as error:
        print_error(str(error))
        return 2
    except (OSError, ValueError) as error:
        print_error(describe_error(error))
        return 1


def _check(args: argparse.Namespace) -> None:
    """Reject invalid numbers."""
    for name, value in (("--devices", args.devices), ("--max-compilations", args.max_compilations)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, but must be at least 1.")
    if args.target_memory is not None and not 0 < args.target_memory < math.inf:
        raise ConfigError(f"--target-memory is {args.target_memory}, but must be a number of GiB above 0.")


def _plan(settings: dict[str, Any], args: argparse.Namespace) -> int:
    import jax

    from xlstm_jax.planning.plan import make_plan
    from xlstm_jax.planning.search import search
    from xlstm_jax.planning.tables import render, render_search
    from xlstm_jax.recipes.performance import planned_devices, resolve_performance
    from xlstm_jax.recipes.run_config import build_run

    config = build_run(settings)
    setup = config.setup(args.devices or jax.device_count())
    accelerator = _find_accelerator(args.accelerator, setup.num_devices)
    if args.target_memory is None:
        performance = resolve_performance(config, settings, planned_devices(accelerator, setup.axis_sizes), None)
        setup = performance.apply(config).setup(setup.num_devices)
        compiles = args.accelerator in (None, "cpu") and not args.no_compile
        plan = make_plan(
            setup,
            accelerator,
            compiles=compiles,
            num_steps=config.num_train_steps,
            performance=performance.reason,
        )
    else:
        target = args.target_memory * GIB
        result = search(setup, target, accelerator, max_compilations=args.max_compilations, report=print_error)
        print_out(render_search(result, target))
        if result.setup is None:
            return 1
        print_out(f"\n{as_command('train', *args.overrides, *_overrides(result.setup))}\n")
        plan = make_plan(result.setup, accelerator, compiles=False, num_steps=config.num_train_steps)
        plan = dataclasses.replace(plan, compiled=result.compiled)
    print_out(render(plan, sharding=args.sharding))
    if args.json is not None:
        args.json.write_text(json.dumps(plan.to_dict(), indent=2) + "\n", encoding="utf-8")
    return 0


def _find_accelerator(name: str | None, num_devices: int) -> Any:
    """Return the named accelerator, or that of this machine; raise a `ConfigError` for an unknown name."""
    import jax

    from xlstm_jax.planning.plan import resolve_accelerator

    if name is None:
        here = "cpu" if jax.default_backend() == "cpu" else jax.devices()[0].device_kind
        return resolve_accelerator(here, num_devices)
    try:
        return resolve_accelerator(name, num_devices)
    except ValueError as error:
        raise ConfigError(f"--accelerator: {error}") from error


def _overrides(setup: Any) -> list[str]:
    """Return the overrides that reproduce a setup found by the search."""
    parallel = setup.model.parallel
    return [
        f"model.remat={setup.shape.remat}",
        f"trainer.gradient_accumulate_steps={setup.accumulation}",
        "trainer.gradient_accumulate_scan=true",
        "parallel.data_axis_size=-1",
        f"parallel.fsdp_axis_size={parallel.fsdp_axis_size}",
        f"parallel.model_axis_size={parallel.model_axis_size}",
        f"parallel.fsdp_modules=[{','.join(parallel.fsdp_modules)}]",
        "parallel.remat=[]",
    ]
