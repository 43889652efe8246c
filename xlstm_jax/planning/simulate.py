"""Compile for more devices than this machine has: a subprocess simulates them on the CPU."""

import dataclasses
import json
import os
import subprocess
import sys

import jax

from xlstm_jax.planning.compiled import CompiledMemory, compile_here
from xlstm_jax.planning.setup import Setup

SHOWN_LINES = 5
DISTRIBUTED = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_STEP_NODELIST")
"""Environment variables that would make the subprocess join a distributed job."""


def compiled_memory(setup: Setup) -> CompiledMemory:
    """Compile the training step of a run: in this process if it has enough devices, else for simulated ones."""
    return compile_here(setup) if setup.num_devices <= jax.device_count() else compile_elsewhere(setup)


def compile_elsewhere(setup: Setup) -> CompiledMemory:
    """Compile the training step of a run in a subprocess with enough simulated CPU devices."""
    environment = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED}
    flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={setup.num_devices}"
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-m", __name__],
        input=setup.to_json(),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        reason = "\n".join(process.stderr.strip().splitlines()[-SHOWN_LINES:])
        raise RuntimeError(
            f"The process that simulates {setup.num_devices} devices ended with code {process.returncode}:\n{reason}"
        )
    return CompiledMemory(**json.loads(process.stdout))


def main() -> None:
    """Read a setup from stdin, compile its step and write the memory of the step to stdout."""
    memory = compile_here(Setup.from_json(sys.stdin.read()))
    sys.stdout.write(json.dumps(dataclasses.asdict(memory)))


if __name__ == "__main__":
    main()
