"""Training throughput of the recipes on one GPU, as shipped, beside the bare step and PyTorch peers.

    xlstm-jax bench gpu [-- --only xlstm_160m llama_160m] [--parts log step peer] [--time-limit 560]

For each experiment of the table, in processes of their own:

- `log`: `xlstm-jax train experiment=NAME batch_size=B data=synthetic`, as a user would type it. Tokens/s are the median
  of the training log's rows after step 20, up to step 100; then the run is killed. All settings are those of the
  recipe, its number of steps included, and what `performance: auto` chooses. Tokens are random, in packed documents.
- `step`: the bare compiled step with the same model, optimizer, settings and kind of data (`train_step.py`).
- `peer`: PyTorch at the same shape and on the same tokens (`peers/torch_step.py`), if torch is installed.

What was measured today is kept in `<date>-gpu.json` and not measured again, so the table can be made in several calls;
`--again` measures anew. The page `<date>-gpu.md` and the chart `<date>-gpu.svg` are written from that file.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from support.gpu_page import FIRST_STEP, LAST_STEP, ROWS, Entry, Row, render_chart, render_page

from xlstm_jax.cli.shared.gpu_memory import list_gpus
from xlstm_jax.recipes.compose import compose
from xlstm_jax.recipes.run_config import build_run
from xlstm_jax.trainer.base.run_metrics import flops_per_token
from xlstm_jax.utils.startup import describe_startup

HERE = Path(__file__).parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", HERE / "results"))
PARTS = ("log", "step", "peer")
SECONDS = {"log": 400, "step": 300, "peer": 240}
"""After how long a process of each part is killed."""


ENOUGH_ROWS = 3
"""Rows of the log after the first steps that will do if the time is up before the last step."""


class TimeUpError(Exception):
    """There is no time left for the measurement that was going on or would be next."""


class Results:
    """What was measured on a day, in a file that is written after each measurement.

    Args:
        folder: Where the file, the page and the chart are.
        date: The day.
    """

    def __init__(self, folder: Path, date: str):
        self.stem, self.date = folder / f"{date}-gpu", date
        file = self.stem.with_suffix(".json")
        self.values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def get(self, row: Row, part: str) -> Entry:
        """Return a measurement; nothing if there is none."""
        return self.values.get("rows", {}).get(row.name, {}).get(part, {})

    def put(self, row: Row, part: str, entry: Entry) -> None:
        """Add a measurement."""
        self.values.setdefault("machine", describe_machine())
        self.values.setdefault("rows", {}).setdefault(row.name, {})[part] = entry
        self._write(".json", json.dumps(self.values, indent=1) + "\n")

    def write_page(self) -> str:
        """Write the page and the chart, and return the page."""
        page = render_page(self)
        self._write(".md", page)
        if chart := render_chart(self):
            self._write(".svg", chart)
        return page

    def _write(self, suffix: str, text: str) -> None:
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.stem.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.stem.with_suffix(suffix))


@dataclasses.dataclass
class Process:
    """How a process ended."""

    output: str
    exit_code: int | None
    """`None` if the time was up."""
    seconds: float

    def raise_for_failure(self) -> None:
        """Raise an error with the last line that tells why, if the process failed."""
        if self.exit_code is None:
            raise TimeUpError
        if self.exit_code:
            lines = [line.strip() for line in self.output.splitlines() if line.strip()]
            errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
            raise RuntimeError((errors or lines or [f"exit code {self.exit_code}"])[-1][:300])


def run_process(
    command: Sequence[str], environment: dict[str, str], limit: float, is_done: Callable[[], bool] = lambda: False
) -> Process:
    """Run a command until it ends or `is_done`, and end all that it has started."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        child = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        exit_code = None
        try:
            while exit_code is None and time.perf_counter() - start < limit:
                if is_done():
                    exit_code = 0
                else:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        exit_code = child.wait(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            output.seek(0)
            text = output.read()
    return Process(text, exit_code, time.perf_counter() - start)


def measure_log(row: Row, folder: Path, limit: float, settings: Sequence[str]) -> Entry:
    """Train as a user would, and read the log."""
    words = [f"experiment={row.experiment}", f"batch_size={row.batch}", "data=synthetic", *settings]
    command = [sys.executable, "-m", "xlstm_jax.cli.main", "train", *words, f"hydra.run.dir={folder}"]
    logs = folder / "file_logs"

    def is_done() -> bool:
        return any(each["log_step"] >= LAST_STEP for each in read_rows(logs / "metrics_train.jsonl"))

    process = run_process(command, environment_of(folder) | {"COLUMNS": "300"}, limit, is_done)
    rows = [each for each in read_rows(logs / "metrics_train.jsonl") if "tokens_per_second" in each]
    rows = [each for each in rows if each["log_step"] <= LAST_STEP]
    if process.exit_code is not None or sum(each["log_step"] > FIRST_STEP for each in rows) < ENOUGH_ROWS:
        process.raise_for_failure()
    (startup, *_) = read_rows(logs / "metrics_startup.jsonl")
    (model, *_) = read_rows(logs / "metrics_model.jsonl")
    measured = [each for each in rows if each["log_step"] > FIRST_STEP]
    if not measured:
        raise RuntimeError(f"The run ended at step {rows[-1]['log_step'] if rows else 0}, before step {LAST_STEP}.")
    header = read_header(process.output)
    memory = re.search(r"([\d.]+)(?: of [\d.]+)? GiB", header.get("memory", ""))
    chosen = folder / "performance.json"
    return {
        "command": shlex.join(["xlstm-jax", "train", *words]),
        "tokens_per_second": median(measured, "tokens_per_second"),
        "mfu": median(measured, "mfu"),
        "mfu_6n": six_n_mfu(words, measured),
        "steps": [measured[0]["log_step"], measured[-1]["log_step"]],
        "step_times": [each["step_time"] for each in measured],
        "data_wait_time": median(measured, "data_wait_time"),
        "peak_gib": max(each["device_memory_gib"] for each in rows),
        "header_gib": float(memory[1]) if memory else None,
        "first_step_seconds": startup["startup_seconds"],
        "settings": header.get("performance", "-").partition(" (auto")[0],
        "performance": json.loads(chosen.read_text(encoding="utf-8")) if chosen.is_file() else None,
        "startup": describe_startup(startup),
        "header": header,
        "num_parameters": model["num_params"],
    }


def measure_step(row: Row, folder: Path, limit: float, settings: Sequence[str]) -> Entry:
    """Time the bare step."""
    words = ["--experiment", row.experiment, f"batch_size={row.batch}", *settings]
    return run_script(HERE / "train_step.py", words, folder, limit)


def measure_peer(row: Row, peer: str, folder: Path, limit: float, settings: Sequence[str], flags: list[str]) -> Entry:
    """Time the step of a peer."""
    words = ["--experiment", row.experiment, "--peer", peer, "--batch", str(row.peer_batch), *settings, *flags]
    return run_script(HERE / "peers" / "torch_step.py", words, folder, limit)


def run_script(script: Path, words: Sequence[str], folder: Path, limit: float) -> Entry:
    """Run a benchmark that writes its figures as JSON."""
    file = folder / "figures.json"
    folder.mkdir(parents=True, exist_ok=True)
    process = run_process([sys.executable, str(script), *words, "--json", str(file)], environment_of(folder), limit)
    process.raise_for_failure()
    command = shlex.join(["python", f"benchmarks/{script.relative_to(HERE)}", *words])
    return {"command": command, **json.loads(file.read_text(encoding="utf-8"))}


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of a part: the first GPU, and a compilation cache that only parts of its row share."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    cache = str(folder.parent / "cache")
    return {"CUDA_VISIBLE_DEVICES": gpu, "XLSTM_JAX_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}


def read_rows(log: Path) -> list[Entry]:
    """Return the rows of a log, if there is one; the last line may be incomplete."""
    rows = []
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def read_header(output: str) -> dict[str, str]:
    """Return what a run prints before it starts, by name."""
    header: dict[str, str] = {}
    for line in output.splitlines():
        if match := re.fullmatch(r"│ (.{1,30}?)(?:  +(.*?))? *│", line):
            name, value = match[1].strip(), (match[2] or "").strip()
            if name and value:
                header[name] = value
            elif header:
                last = next(reversed(header))
                header[last] += f"\n{name or value}"
    return header


def median(rows: Sequence[Entry], name: str) -> float | None:
    """Return the median of a column, if the log has it."""
    values = [row[name] for row in rows if name in row]
    return statistics.median(values) if values else None


def six_n_mfu(words: Sequence[str], rows: Sequence[Entry]) -> float | None:
    """Return the utilisation by six FLOPs per parameter and token: that of the log, or converted from its MFU."""
    logged, mfu = median(rows, "mfu_6n"), median(rows, "mfu")
    if logged is not None or mfu is None:
        return logged
    from xlstm_jax.models.cost import model_cost

    run = build_run(compose(words))
    shape: Any = run.model.model_config
    parameters = model_cost(shape, sequence_length=run.context_length).parameters
    return mfu * 6 * parameters / flops_per_token(shape, run.context_length)


def describe_machine() -> dict[str, str]:
    """Describe what results depend on, without starting JAX on the GPU."""
    gpu = next((found.name for found in list_gpus()), "none")
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        gpu += f", driver {found[0]}" if found else ""
    packages = []
    for name in ("jax", "torch", "triton", "xlstm", "mlstm-kernels"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages.append(f"{name} {importlib.metadata.version(name)}")
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    )
    return {
        "GPU": gpu,
        "Packages": ", ".join([*packages, f"Python {sys.version.partition(' ')[0]}"]),
        **({"Commit": commit} if commit else {}),
    }


def measure_all(results: Results, options: argparse.Namespace) -> Iterator[str]:
    """Measure what is missing, and yield a line for each measurement; stop when the time is up."""
    deadline = time.monotonic() + options.time_limit
    has_torch = importlib.util.find_spec("torch") is not None
    if "peer" in options.parts and not has_torch:
        yield "There is no torch: peers are left out."
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for row, part, measure in measurements(options, Path(scratch)):
            kind = part.partition(":")[0]
            if kind not in options.parts or (kind == "peer" and not has_torch):
                continue
            if results.get(row, part) and not options.again:
                continue
            left = deadline - time.monotonic()
            if left < row.seconds[kind]:
                yield f"{row.name}, {part}: left out, for {left:.0f} s are too few. Run this again for the rest."
                continue
            start = time.perf_counter()
            try:
                entry = measure(min(left, SECONDS[kind]))
            except TimeUpError:
                if left < SECONDS[kind]:
                    yield f"{row.name}, {part}: stopped after {left:.0f} s, the last. Run this again for the rest."
                    return
                entry = {"error": f"stopped after {SECONDS[kind]} s"}
            except (RuntimeError, OSError, ValueError, KeyError) as error:
                entry = {"error": f"{error}" if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"}
            entry["date"], entry["seconds"] = datetime.date.today().isoformat(), round(time.perf_counter() - start, 1)
            results.put(row, part, entry)
            rates = [
                f"{each['tokens_per_second']:,.0f} tokens/s"
                for each in (entry, *entry.get("rows", []))
                if "tokens_per_second" in each
            ]
            yield f"{row.name}, {part}: {', '.join(rates) or entry.get('error')}; {entry['seconds']:.0f} s"


def measurements(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[Row, str, Callable[[float], Entry]]]:
    """Yield every measurement with the function that takes it: what needs no peer comes first."""
    rows = [row for row in ROWS if not options.only or row.experiment in options.only]
    for row in rows:
        folder = scratch / row.experiment
        for part in [part for part in ("log", "step") if part in row.seconds]:

            def measure(limit: float, row: Row = row, part: str = part, folder: Path = folder / part) -> Entry:
                return {"log": measure_log, "step": measure_step}[part](row, folder, limit, options.set)

            yield row, part, measure
        shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        for peer in row.peers:
            folder = scratch / row.experiment / peer

            def measure(limit: float, row: Row = row, peer: str = peer, folder: Path = folder) -> Entry:
                return measure_peer(row, peer, folder, limit, options.set, options.peer_options)

            yield row, f"peer:{peer}", measure


def main() -> None:
    """Measure what is missing, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[row.experiment for row in ROWS], help="experiments to measure")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure of them")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), metavar="SECONDS", help="stop after this long"
    )
    parser.add_argument("--again", action="store_true", help="also measure what was measured today")
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where results are written")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="the day of the results")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings, to try the script out")
    parser.add_argument("--peer-options", type=shlex.split, default=[], metavar="'...'", help="more options of peers")
    parser.add_argument("--any-device", action="store_true", help="run without a GPU too, to try the script out")
    options = parser.parse_args()
    results = Results(options.output, options.date)
    can_measure = options.any_device or bool(list_gpus())
    if not can_measure and not results.values:
        parser.exit(1, "There is no NVIDIA GPU here: run this on one, or add --any-device to try it out.\n")
    for line in measure_all(results, options) if can_measure else ["There is no NVIDIA GPU here: nothing is measured."]:
        print(line, file=sys.stderr, flush=True)
        results.write_page()
    print(results.write_page())


if __name__ == "__main__":
    main()
