"""What float8 does to recipes: speed, memory and loss of the same run with model.float8=false and true.

    python benchmarks/float8_recipes.py [--experiments xlstm_400m xlstm_1_4b] [--steps 300] [--time-limit 540]

Each run is the command `xlstm-jax train experiment=...` with the recipe's model and optimizer, on the source of
Python's standard library in packed rows. Both start from the same parameters and see the same batches. The batch is
smaller than the recipe's and the learning rate lower, as there are few steps. Speed is the median of the logged
tokens/s after the first quarter of the steps; a loss is the mean over a tenth of the steps before the step it names. A
run that is not done at the time limit is stopped. --tiny takes a model for a CPU.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from xlstm_jax.cli.gpu_memory import list_gpus

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ["xlstm_400m", "xlstm_1_4b", "xlstm_2_7b"]
TINY = ["model.embedding_dim=64", "model.num_blocks=2", "model.num_heads=2"]


def run_command(*words: str, log: Path, timeout: float | None = None, **changes: str) -> None:
    """Run a command of xlstm-jax; what it prints goes into a file."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **changes}
    print(f"$ {shlex.join(['xlstm-jax', *words])}", flush=True)
    with log.open("wb") as file:
        code = subprocess.run(
            [sys.executable, "-m", "xlstm_jax.cli.main", *words],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        ).returncode
    if code:
        raise RuntimeError(f"exit code {code}: {' '.join(log.read_text().split())[-400:]}")


def train(experiment: str, float8: bool, folder: Path, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Train a recipe for a few steps, and return its figures."""
    run = folder / f"{experiment}_{'float8' if float8 else 'bfloat16'}"
    data = folder / "data"
    run_command(
        "train",
        f"experiment={experiment}",
        f"model.float8={str(float8).lower()}",
        "data=prepared",
        f"data.data_path={data}",
        f"data.tokenizer_path={data / 'tokenizer'}",
        "data.validation=null",
        f"batch_size={arguments.batch_size}",
        f"context_length={arguments.context}",
        f"num_train_steps={arguments.steps}",
        f"scheduler.lr={arguments.lr}",
        f"scheduler.warmup_steps={arguments.steps // 10}",
        "scheduler.cooldown_steps=0",
        f"logger.log_every_n_steps={max(1, arguments.steps // 30)}",
        "callbacks.checkpoint=null",
        "callbacks.report=null",
        *(TINY if arguments.tiny else []),
        f"hydra.run.dir={run}",
        log=run.with_suffix(".log"),
        timeout=seconds,
    )
    rows = list(map(json.loads, (run / "file_logs" / "metrics_train.jsonl").read_text().splitlines()))
    rows = [row for row in rows if "tokens_per_second" in row]
    late = [row for row in rows if row["log_step"] > arguments.steps // 4]

    def loss(step: float) -> float:
        """Return the mean loss of the steps before this one."""
        first = step - arguments.steps / 10
        return float(np.mean([row["loss_mean"] for row in rows if first < row["log_step"] <= step]))

    return {
        "rate": float(np.median([row["tokens_per_second"] for row in late])),
        "memory": max(row.get("device_memory_gib", float("nan")) for row in rows),
        "losses": [loss(arguments.steps * third / 3) for third in (1, 2, 3)],
    }


def main() -> None:
    """Run all recipes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--time-limit", type=float, default=540, metavar="SECONDS")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not list_gpus():
        print("There is no GPU: --tiny takes a model for a CPU.")
        return
    end = time.monotonic() + arguments.time_limit
    steps = [round(arguments.steps * third / 3) for third in (1, 2, 3)]
    at_steps = " | ".join(f"loss at {step}: bfloat16, float8" for step in steps)
    lines = [
        f"| experiment | tokens/s bfloat16 | float8 | speed | GiB bfloat16 | float8 | {at_steps} |",
        f"|{'---|' * (6 + len(steps))}",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("prepare", "stdlib", "--output", str(folder / "data"), "--train-tokenizer", "16384")
        run_command(*words, log=folder / "prepare.log", JAX_PLATFORMS="cpu")
        for experiment in arguments.experiments:
            try:
                plain, float8 = (train(experiment, f, folder, arguments, end - time.monotonic()) for f in (False, True))
            except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
                lines.append(f"| {experiment} | {type(error).__name__}: {str(error)[-300:]} |")
                print(lines[-1], flush=True)
                continue
            pairs = zip(plain["losses"], float8["losses"], strict=True)
            losses = [f"{a:.4f}, {b:.4f} ({b / a - 1:+.2%})" for a, b in pairs]
            speed = f"{plain['rate']:,.0f} | {float8['rate']:,.0f} | {float8['rate'] / plain['rate']:.2f}"
            lines.append(
                f"| {experiment} | {speed} | {plain['memory']:.1f} | {float8['memory']:.1f} | {' | '.join(losses)} |"
            )
            print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
