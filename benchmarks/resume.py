"""Whether a run that is killed again and again ends with the parameters of a run that is not: bit by bit, on a GPU.

    python benchmarks/resume.py [--kills 10] [--steps 600] [--time-limit 270] [--end 520] [--json FILE] [--tiny]
    python benchmarks/resume.py --cost [--steps 60]

Each mode trains one model on the source of Python's standard library through the command line: once or twice without a
stop, and once with SIGKILL at random times, resumed after each. All runs share the GPU, so that kernels are autotuned
under the worst conditions. A comparison is printed as soon as both of its runs have ended. What still runs at --end is
killed, and compared at the last step that both have a checkpoint of. The modes:

    default          as shipped, with the compilation cache
    no cache         as shipped, but each start compiles and autotunes again, as after an update or on another machine
    deterministic    trainer.deterministic=true, without the cache

--cost measures tokens/s of experiment=xlstm_160m with and without trainer.deterministic, one run after the other.
--tiny takes a model for a CPU.
"""

import argparse
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from xlstm_jax.cli.shared.gpu_memory import list_gpus

ROOT = Path(__file__).parent.parent
MODES = {
    "default": ([], {}),
    "no cache": ([], {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
    "deterministic": (["trainer.deterministic=true"], {"JAX_ENABLE_COMPILATION_CACHE": "false"}),
}
"""Settings and environment of each mode."""
UNINTERRUPTED = {"default": 1, "no cache": 2, "deterministic": 1}
"""Runs without a stop; of two, the second shows how far two runs differ that nobody kills."""
MODEL = ["model=xlstm_160m", "model.num_blocks=4", "batch_size=16", "context_length=2048"]
TINY = ["model=xlstm_tiny", "batch_size=8", "context_length=64"]


def command(*words: str) -> list[str]:
    """Return a command of xlstm-jax."""
    return [sys.executable, "-m", "xlstm_jax.cli.main", *words]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a command."""
    paths = (str(ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **changes}


def train_words(folder: Path, data: Path, arguments: argparse.Namespace, settings: list[str]) -> list[str]:
    """Return the command that starts a run in a folder, or continues it."""
    every = arguments.checkpoint_every
    return command(
        "train",
        *(TINY if arguments.tiny else MODEL),
        "model.vocab_size=null",
        "performance=manual",
        "data=prepared",
        f"data.data_path={data}",
        f"data.tokenizer_path={data / 'tokenizer'}",
        "data.validation=null",
        f"num_train_steps={arguments.steps}",
        "scheduler.warmup_steps=20",
        "logger.log_every_n_steps=5",
        f"callbacks.checkpoint.every_n_steps={every}",
        f"callbacks.checkpoint.keep_every={every * max(1, arguments.steps // (4 * every))}",
        "callbacks.checkpoint.monitor=null",
        "callbacks.report=null",
        *settings,
        f"hydra.run.dir={folder}",
    )


def step_of(folder: Path) -> int:
    """Return the last step that the run has reported."""
    try:
        return json.loads((folder / "heartbeat.json").read_text())["step"]
    except (OSError, ValueError, KeyError):
        return 0


def run_once(words: list[str], folder: Path, env: dict[str, str]) -> subprocess.Popen:
    """Start a run; what it prints goes into a file beside its folder."""
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


def train_to_the_end(words: list[str], folder: Path, env: dict[str, str], end: float) -> None:
    """Train without a stop, but not beyond a time."""
    process = run_once(words, folder, env)
    try:
        code = process.wait(max(end - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        print(f"{folder.name} was stopped after step {step_of(folder)}, as the time is over.", flush=True)
        return
    if code:
        raise RuntimeError(f"exit code {code}: {folder.with_suffix('.log').read_text()[-1000:]}")


def train_with_kills(
    words: list[str], folder: Path, env: dict[str, str], arguments: argparse.Namespace, begin: float
) -> list[int]:
    """Kill a run at random times, resume it each time, and return the steps at which it was killed."""
    draw, killed_at, end = random.Random(arguments.seed), [], begin + arguments.end
    while len(killed_at) < arguments.kills and time.monotonic() < begin + arguments.time_limit:
        start = step_of(folder)
        process = run_once(words, folder, env)
        in_startup = draw.random() < 0.25
        wait = draw.uniform(1, 8) if in_startup else draw.uniform(0.5, 3)
        while not in_startup and process.poll() is None and step_of(folder) <= start and time.monotonic() < end:
            time.sleep(0.05)
        try:
            code = process.wait(wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed_at.append(step_of(folder))
            continue
        if code:
            raise RuntimeError(f"exit code {code}: {folder.with_suffix('.log').read_text()[-1000:]}")
        break  # at the end of training
    train_to_the_end(words, folder, env, end)
    return killed_at


def checkpoints_of(folder: Path) -> dict[int, Path]:
    """Return the checkpoints of a run by their steps."""
    found = (folder / "checkpoints").glob("checkpoint_*")
    return {int(number): path for path in found if (number := path.name.removeprefix("checkpoint_")).isdigit()}


def read_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """Read parameters and optimizer state."""
    import jax
    import orbax.checkpoint as ocp

    arrays = {}
    for item in ("params", "opt_state"):
        handler = ocp.PyTreeCheckpointer()
        path = checkpoint.resolve() / item
        tree = handler.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = handler.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
        named, _ = jax.tree_util.tree_flatten_with_path(restored)
        arrays |= {item + jax.tree_util.keystr(name): np.asarray(x) for name, x in named}
    return arrays


def losses(folder: Path) -> dict[int, float]:
    """Return the logged losses by step; of a step that was done twice, the last."""
    log, found = folder / "file_logs" / "metrics_train.jsonl", {}
    rows = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    for row in rows:
        loss = next((value for name, value in row.items() if name.startswith("loss")), None)
        if loss is not None:
            found[row["log_step"]] = loss
    return found


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Say how far two runs differ: their losses, and the arrays of the last checkpoint that both have."""
    a, b = losses(first), losses(second)
    both = sorted(a.keys() & b.keys())
    differing = [step for step in both if a[step] != b[step]]
    row: dict[str, Any] = {"losses compared": len(both), "first loss that differs": differing[0] if differing else "-"}
    if both:
        row["difference of last losses"] = f"{abs(a[both[-1]] - b[both[-1]]):.1e}"
    ours, theirs = checkpoints_of(first), checkpoints_of(second)
    if not (common := ours.keys() & theirs.keys()):
        return {"step": "-", "same bits": "no checkpoint in common"} | row
    return {"step": max(common)} | compare_arrays(*(read_arrays(each[max(common)]) for each in (ours, theirs))) | row


def compare_arrays(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, Any]:
    """Say how far the arrays of two checkpoints differ."""
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    num_bits = num_equal_bits = num_values = num_equal = 0
    largest, equal_arrays = 0.0, 0
    for name, a in ours.items():
        b = theirs[name]
        raw_a, raw_b = (np.atleast_1d(x).view(np.uint8) for x in (a, b))
        num_bits += 8 * raw_a.size
        num_equal_bits += 8 * raw_a.size - int(np.bitwise_count(raw_a ^ raw_b).sum())
        num_values, num_equal = num_values + a.size, num_equal + int(np.sum(a == b))
        equal_arrays += int(np.array_equal(raw_a, raw_b))
        if name.startswith("params"):
            scale = np.sqrt(np.mean(np.square(a, dtype=np.float64))) or 1.0
            largest = max(largest, float(np.max(np.abs(a.astype(np.float64) - b))) / scale)
    return {
        "same bits": "yes" if num_bits == num_equal_bits else "no",
        "equal bits": f"{num_equal_bits / num_bits:.6f}",
        "equal values": f"{num_equal / num_values:.4f}",
        "equal arrays": f"{equal_arrays}/{len(ours)}",
        "largest difference of a parameter / rms": f"{largest:.1e}",
    }


COLUMNS = (
    "mode",
    "second run",
    "kills",
    "step",
    "same bits",
    "equal bits",
    "equal values",
    "equal arrays",
    "largest difference of a parameter / rms",
    "losses compared",
    "first loss that differs",
    "difference of last losses",
)


def measure_resuming(arguments: argparse.Namespace, folder: Path) -> None:
    """Run all modes at once, and print how far their runs differ."""
    begin = time.monotonic()
    data = folder / "data"
    prepare = command("prepare", "stdlib", "--output", str(data), "--train-tokenizer", "2048")
    subprocess.run(prepare, env=environment(JAX_PLATFORMS="cpu"), check=True, stdout=subprocess.DEVNULL)
    print(f"Prepared the data in {time.monotonic() - begin:.0f} s.", flush=True)
    runs = [(mode, number) for mode in arguments.modes for number in range(1 + UNINTERRUPTED[mode])]
    share, num_killed = f"{0.9 / len(runs):.3f}", {}

    def run(mode: str, number: int) -> None:
        settings, changes = MODES[mode]
        path = folder / f"{mode} {number}".replace(" ", "_")
        path.mkdir()
        env = environment(XLA_PYTHON_CLIENT_MEM_FRACTION=share, XLA_PYTHON_CLIENT_PREALLOCATE="false", **changes)
        words = train_words(path, data, arguments, settings)
        if number:
            train_to_the_end(words, path, env, begin + arguments.end)
        else:
            num_killed[mode] = train_with_kills(words, path, env, arguments, begin)
        print(f"{mode}, {'without a stop' if number else 'killed'}: {time.monotonic() - begin:.0f} s", flush=True)

    rows, done = [], set()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(len(runs)) as pool:
        futures = {pool.submit(run, mode, number): (mode, number) for mode, number in runs}
        for future in concurrent.futures.as_completed(futures):
            mode, number = futures[future]
            if error := future.exception():
                print(f"{mode} {number}: {error}", flush=True)
                continue
            done.add((mode, number))
            for other in {0, 2} if number == 1 else {number}:
                if {(mode, 1), (mode, other)} <= done:
                    paths = [folder / f"{mode} {each}".replace(" ", "_") for each in (1, other)]
                    kills = {"second run": "not killed", "kills": 0}
                    if other == 0:
                        kills = {"second run": "killed", "kills": len(num_killed[mode]), "at": num_killed[mode]}
                    rows.append({"mode": mode, **kills, **compare(*paths)})
                    print(f"| {' | '.join(str(rows[-1].get(name, '-')) for name in COLUMNS)} |", flush=True)
                    write_json(arguments, rows)
    print(f"\nAll runs took {time.monotonic() - begin:.0f} s. Kills at steps: {num_killed}")


def write_json(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what was measured so far, if there is a file for it."""
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def measure_cost(arguments: argparse.Namespace, folder: Path) -> None:
    """Print tokens/s with and without deterministic kernels."""
    words = ["experiment=xlstm_160m", "batch_size=16", "data=synthetic"]
    if arguments.tiny:
        words = [*TINY, "data=synthetic", "model.vocab_size=256"]
    print("| trainer.deterministic | tokens/s |\n|---|---|", flush=True)
    end, measured = time.monotonic() + arguments.end, []
    for value in ("false", "true"):
        path = folder / value
        path.mkdir()
        options = [f"num_train_steps={arguments.steps}", "scheduler.warmup_steps=0", "scheduler.cooldown_steps=0"]
        options += ["logger.log_every_n_steps=10", "callbacks.checkpoint=null", "callbacks.report=null"]
        options += [f"trainer.deterministic={value}", f"hydra.run.dir={path}"]
        train_to_the_end(command("train", *words, *options), path, environment(), end)
        rows = list(map(json.loads, (path / "file_logs" / "metrics_train.jsonl").read_text().splitlines()))
        rates = [row[name] for row in rows for name in row if name.startswith("tokens_per_second")]
        if not rates:
            rates = [float("nan")]
            print(f"No tokens_per_second among {sorted(rows[-1])}.")
        measured.append({"deterministic": value, "tokens_per_second": float(np.median(rates[len(rates) // 3 :]))})
        print(f"| {value} | {measured[-1]['tokens_per_second']:,.0f} |", flush=True)
        write_json(arguments, measured)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each mode")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--checkpoint-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--time-limit", type=float, default=270, help="seconds after which no run is killed any more")
    parser.add_argument("--end", type=float, default=520, help="seconds after which all runs are killed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seed", type=int, default=0, help="of the times at which runs are killed")
    parser.add_argument("--folder", type=Path, help="where to keep the runs; by default they are deleted")
    parser.add_argument("--cost", action="store_true", help="measure what deterministic kernels cost")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    arguments = parser.parse_args()
    if not arguments.tiny and not list_gpus():
        print("There is no GPU: --tiny takes a model for a CPU.")
        return
    measure = measure_cost if arguments.cost else measure_resuming
    if arguments.folder:
        arguments.folder.mkdir(parents=True)
        measure(arguments, arguments.folder.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(arguments, Path(folder))


if __name__ == "__main__":
    main()
