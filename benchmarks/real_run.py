"""A real training run: xLSTM-160M and its Llama twin learn Python from the packages that are installed here.

    python benchmarks/real_run.py [--folder runs/real_run] [--seconds 180] [--only data xlstm llama] [--time-limit 540]

Everything goes through the command line, as a user would type it; each command is printed. The source code of all
installed packages is tokenised with a tokenizer that is trained on it. Both models train on the same tokens in the same
order, for as many steps as xLSTM is expected to take in --seconds at --rate tokens/s. The xLSTM is killed with SIGKILL
on the way and resumed. Afterwards both continue a few prompts.

Written into the folder: results.md with loss, time and throughput, loss_by_tokens.svg and loss_by_time.svg,
samples.txt, and report.html with all curves. Parts that are done already are skipped, and a run that was not done at
the time limit goes on from its last checkpoint, so the script can be run in several calls. --tiny takes models for a
CPU.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.line_chart import line_chart

from xlstm_jax.cli.shared.gpu_memory import list_gpus

ROOT = Path(__file__).parent.parent
EXPERIMENTS = {"xlstm": "xlstm_160m", "llama": "llama_160m"}
NAMES = {"xlstm": "xLSTM-160M", "llama": "Llama-160M"}
BATCH_SIZE, CONTEXT = 32, 2048
TINY = ["model.embedding_dim=64", "model.num_blocks=2"]
PROMPTS = ('def main():\n    """', "import numpy as np\n\n", "class Config:\n")


def command(*words: str) -> list[str]:
    """Return a command of xlstm-jax, and print it as a user would type it."""
    print(f"$ {shlex.join(['xlstm-jax', *words])}", flush=True)
    return [sys.executable, "-m", "xlstm_jax.cli.main", *words]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a command."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **changes}


def prepare_data(arguments: argparse.Namespace) -> None:
    """Tokenise the source code of the installed packages."""
    sources = arguments.sources or [f"{sysconfig.get_paths()['purelib']}/**/*.py"]
    words = ["prepare", *sources, "--output", str(arguments.folder / "data"), "--validation-share", "0.01"]
    words += ["--train-tokenizer", str(arguments.vocab_size), "--train-megabytes", "32", "--on-bad-data", "skip"]
    subprocess.run(command(*words), env=environment(JAX_PLATFORMS="cpu"), check=True)


def train_words(model: str, arguments: argparse.Namespace) -> list[str]:
    """Return the words of the training command."""
    data, steps = arguments.folder / "data", arguments.steps
    return [
        "train",
        f"experiment={EXPERIMENTS[model]}",
        "data=prepared",
        f"data.data_path={data}",
        f"data.tokenizer_path={data / 'tokenizer'}",
        "data.validation.max_steps_per_epoch=8",
        "model.vocab_size=null",
        f"batch_size={arguments.batch_size}",
        f"context_length={arguments.context}",
        f"num_train_steps={steps}",
        "scheduler.lr=1e-3",
        f"scheduler.warmup_steps={steps // 20}",
        "scheduler.cooldown_steps=0",
        f"trainer.check_val_every_n_steps={max(1, steps // 6)}",
        f"callbacks.checkpoint.every_n_steps={max(1, steps // 8)}",
        *(TINY if arguments.tiny else []),
        *(["model.head_dim=32"] if arguments.tiny and model == "llama" else []),
        *(["model.num_heads=2"] if arguments.tiny and model == "xlstm" else []),
        f"hydra.run.dir={arguments.folder / model}",
    ]


def step_of(folder: Path) -> int:
    """Return the last step that a run has reported."""
    try:
        return json.loads((folder / "heartbeat.json").read_text())["step"]
    except (OSError, ValueError, KeyError):
        return 0


def train(model: str, arguments: argparse.Namespace, end: float) -> bool:
    """Train a model to the end, or kill it at some time; return whether it is done. The xLSTM is killed on the way."""
    folder = arguments.folder / model
    events = events_of(folder)
    goes_on = (folder / "config.yaml").exists()
    while True:
        begin = time.monotonic()
        words = ["resume", str(folder)] if goes_on else train_words(model, arguments)
        process = subprocess.Popen(command(*words), env=environment())
        is_to_be_killed = model == "xlstm" and not arguments.no_kill and events["killed_at"] is None
        code = wait_for(process, end, folder, 0.45 * arguments.steps if is_to_be_killed else float("inf"))
        events["seconds"] += time.monotonic() - begin
        if code is None:
            is_over = time.monotonic() >= end
            print(f"{model}: killed after step {step_of(folder)}{', as the time is over' * is_over}.", flush=True)
            events["killed_at"] = events["killed_at"] or step_of(folder)
        elif code:
            raise SystemExit(f"{model}: exit code {code}")
        if folder.exists():
            (folder / "events.json").write_text(json.dumps(events | {"is_done": code == 0}))
        if code == 0 or time.monotonic() >= end:
            return code == 0
        goes_on = True


def wait_for(process: subprocess.Popen, end: float, folder: Path, last_step: float) -> int | None:
    """Return the exit code of a run; kill it at some time, or at a step, and return `None`."""
    while (code := process.poll()) is None:
        if time.monotonic() >= end or step_of(folder) >= last_step:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return None
        time.sleep(0.2)
    return code


def events_of(folder: Path) -> dict[str, Any]:
    """Return what has happened to a run: at which step it was killed, how long it took, whether it is done."""
    file = folder / "events.json"
    return json.loads(file.read_text()) if file.exists() else {"killed_at": None, "seconds": 0.0, "is_done": False}


def rows_of(folder: Path, part: str) -> dict[int, dict[str, Any]]:
    """Return what was logged, by step; of a step that was done twice, the last."""
    file = folder / "file_logs" / f"metrics_{part}.jsonl"
    rows: dict[int, dict[str, Any]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        rows[row["log_step"]] = rows.get(row["log_step"], {}) | row
    return rows


def value(row: dict[str, Any], name: str) -> float | None:
    """Return a metric, whatever it is a mean over."""
    return next((x for key, x in row.items() if key in (name, f"{name}_mean", f"{name}_single")), None)


def curves(folder: Path) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the training loss over millions of tokens, and over seconds of training steps."""
    by_tokens, by_time, seconds, previous = [], [], 0.0, 0
    for step, row in sorted(rows_of(folder, "train").items()):
        loss, step_time = value(row, "loss"), row.get("step_time")
        if loss is not None and step_time is not None:
            seconds += step_time * (step - previous)
            previous = step
            by_tokens.append((row["tokens_seen"] / 1e6, loss))
            by_time.append((seconds, loss))
    return _smoothed(by_tokens), _smoothed(by_time)


def _smoothed(points: list[tuple[float, float]], window: int = 5) -> list[tuple[float, float]]:
    """Return running means."""
    ys = [y for _, y in points]
    return [(x, float(np.mean(ys[max(0, i - window + 1) : i + 1]))) for i, (x, _) in enumerate(points)]


def write_results(arguments: argparse.Namespace) -> None:
    """Write the table, the charts, the samples and the page."""
    folder = arguments.folder
    started = [model for model in EXPERIMENTS if rows_of(folder / model, "train")]
    table = [
        "| model | tokens | last loss | validation loss | tokens/s | training s | wall s, all | killed at step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines: dict[str, tuple[list, list]] = {}
    marks = []
    for model in started:
        run = folder / model
        events = events_of(run)
        rows = rows_of(run, "train")
        by_tokens, by_time = lines[NAMES[model]] = curves(run)
        rates = [row["tokens_per_second"] for row in rows.values() if "tokens_per_second" in row]
        validation = [(step, value(row, "loss")) for step, row in sorted(rows_of(run, "val").items())]
        last = next((f"{loss:.3f}" for _, loss in reversed(validation) if loss is not None), "-")
        if events["killed_at"]:
            marks.append(events["killed_at"] * arguments.batch_size * arguments.context / 1e6)
        loss = f"{by_tokens[-1][1]:.3f} | {last}"
        table.append(
            f"| {NAMES[model]} | {by_tokens[-1][0]:,.1f}M | {loss} | {np.median(rates):,.0f} | "
            f"{by_time[-1][0]:.0f} | {events['seconds']:.0f} | {events['killed_at'] or '-'} |"
        )
    charts = (("loss_by_tokens", "million tokens", 0, marks), ("loss_by_time", "seconds of training steps", 1, []))
    for name, label, index, at in charts:
        title = "Training loss on the source code of installed packages"
        points = {model: line[index] for model, line in lines.items()}
        (folder / f"{name}.svg").write_text(line_chart(title, label, "nats per token", points, at))
    with (folder / "samples.txt").open("w") as samples:
        for model in started:
            prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
            words = command("generate", str(folder / model), *prompts, "-n", "120", "-t", "0.6")
            result = subprocess.run(words, env=environment(), capture_output=True, text=True)
            samples.write(f"===== {NAMES[model]}\n{result.stdout or result.stderr[-500:]}\n")
    runs = [str(folder / model) for model in started]
    subprocess.run(command("report", *runs, "--output", str(folder / "report.html")), env=environment(), check=True)
    text = "\n".join(table)
    (folder / "results.md").write_text(text + "\n")
    print((folder / "samples.txt").read_text()[:3000])
    print(f"\n{text}", flush=True)


def main() -> None:
    """Do what is not done yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/real_run"), help="where everything is kept")
    parser.add_argument("--seconds", type=float, default=180, help="training time of the xLSTM")
    parser.add_argument("--rate", type=float, default=600_000, help="tokens/s that are expected of the xLSTM")
    parser.add_argument("--steps", type=int, help="instead of --seconds")
    parser.add_argument("--sources", nargs="*", help="what to train on; by default, the installed packages")
    parser.add_argument("--vocab-size", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--only", nargs="*", default=["data", "xlstm", "llama", "results"], help="parts to do")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="kill what still trains after this"
    )
    parser.add_argument("--tiny", action="store_true", help="models for a CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not list_gpus():
        print("There is no GPU: --tiny takes a model for a CPU.")
        return
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.time_limit
    if arguments.steps is None:
        arguments.steps = round(arguments.seconds * arguments.rate / (arguments.batch_size * arguments.context))
    is_prepared = arguments.folder / "data_is_prepared"
    if "data" in arguments.only and not is_prepared.exists():
        begin = time.monotonic()
        prepare_data(arguments)
        is_prepared.touch()
        print(f"Prepared the data in {time.monotonic() - begin:.0f} s.", flush=True)
    for model in EXPERIMENTS:
        if (
            model in arguments.only
            and not events_of(arguments.folder / model)["is_done"]
            and not train(model, arguments, end)
        ):
            print(f"The time is over: run this again for the rest of {model}.", flush=True)
            break
    if "results" in arguments.only:
        write_results(arguments)


if __name__ == "__main__":
    main()
