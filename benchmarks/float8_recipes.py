"""What float8 does to recipes: speed, memory and loss of the same run with model.float8=false and true.

    python benchmarks/float8_recipes.py [--experiments xlstm_400m] [--steps 300] [--time-limit 540] [--json FILE]

Each run is the command `xlstm-jax train experiment=...` with the recipe's model and optimizer, on the source of
Python's standard library in packed rows. Both start from the same parameters and see the same batches. The batch is
smaller than the recipe's and the learning rate lower, as there are few steps. Speed is the median of the logged
tokens/s after the first quarter of the steps; a loss is the mean over a tenth of the steps before the step it names. A
run that is not done at the time limit is stopped, and has losses up to where it was. What was measured is in the file
of --json after each run. --tiny takes a model for a CPU.
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

from xlstm_jax.cli.shared.gpu_memory import list_gpus

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ["xlstm_400m", "xlstm_1_4b", "xlstm_2_7b"]
TINY = ["model.embedding_dim=64", "model.num_blocks=2", "model.num_heads=2"]


def run_command(*words: str, log: Path, timeout: float | None = None, **changes: str) -> None:
    """Run a command of xlstm-jax; what it prints goes into a file."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **changes}
    print(f"$ {shlex.join(['xlstm-jax', *words])}", flush=True)
    with log.open("wb") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-m", "xlstm_jax.cli.main", *words],
                env=env,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            print("Stopped, as the time is over.", flush=True)
            return
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
        timeout=max(seconds, 0.0),
    )
    log = run / "file_logs" / "metrics_train.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    rows = [row for row in rows if "tokens_per_second" in row]
    if not rows:
        raise RuntimeError("stopped before the first row of the log")
    late = [row for row in rows if row["log_step"] > arguments.steps // 4] or rows

    def loss(step: float) -> float:
        """Return the mean loss of the steps before this one; not a number if the run did not come so far."""
        first = step - arguments.steps / 10
        found = [row["loss_mean"] for row in rows if first < row["log_step"] <= step]
        return float(np.mean(found)) if found else float("nan")

    return {
        "rate": float(np.median([row["tokens_per_second"] for row in late])),
        "memory": max(row.get("device_memory_gib", float("nan")) for row in rows),
        "losses": [loss(arguments.steps * third / 3) for third in (1, 2, 3)],
        "last step": rows[-1]["log_step"],
        "loss by step": {row["log_step"]: row["loss_mean"] for row in rows},
    }


def describe(experiment: str, found: dict[str, Any]) -> str:
    """Return the row of a recipe; what was not measured is left blank."""
    plain, float8 = found["bfloat16"], found.get("float8")
    if float8 is None:
        losses = " | ".join(f"{a:.4f}, -" for a in plain["losses"])
        return f"| {experiment} | {plain['rate']:,.0f} | - | - | {plain['memory']:.1f} | - | {losses} |"
    pairs = zip(plain["losses"], float8["losses"], strict=True)
    losses = " | ".join(f"{a:.4f}, {b:.4f} ({b / a - 1:+.2%})" for a, b in pairs)
    speed = f"{plain['rate']:,.0f} | {float8['rate']:,.0f} | {float8['rate'] / plain['rate']:.2f}"
    return f"| {experiment} | {speed} | {plain['memory']:.1f} | {float8['memory']:.1f} | {losses} |"


def main() -> None:
    """Run all recipes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", default=EXPERIMENTS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--time-limit", type=float, default=540, metavar="SECONDS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--tiny", action="store_true", help="models for a CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not list_gpus():
        print("There is no GPU: --tiny takes a model for a CPU.")
        return
    end = time.monotonic() + arguments.time_limit
    steps = [round(arguments.steps * third / 3) for third in (1, 2, 3)]
    at_steps = " | ".join(f"loss at {step}: bfloat16, float8" for step in steps)
    measured: dict[str, dict[str, Any]] = {}
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
                for is_float8 in (False, True):
                    found = train(experiment, is_float8, folder, arguments, end - time.monotonic())
                    measured.setdefault(experiment, {})["float8" if is_float8 else "bfloat16"] = found
                    if arguments.json is not None:
                        arguments.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
            except (RuntimeError, ValueError) as error:
                print(f"{experiment}: {str(error)[-300:]}", flush=True)
            if experiment in measured:
                lines.append(describe(experiment, measured[experiment]))
                print(lines[-1], flush=True)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
