"""The rows of the table of training throughput, and its page and chart."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from support.bar_chart import Bar, bar_chart

FIRST_STEP, LAST_STEP = 20, 100
"""The steps of the training log whose median is reported."""
Entry = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table."""

    experiment: str
    batch: int
    peer_batch: int
    """The largest batch that is tried with the peer: twice as many rows do not fit into 140 GiB, if it is smaller."""
    seconds: dict[str, int]
    """The parts of this row, and how long each is expected to take on an H200: with less time left, it is left out."""

    @property
    def name(self) -> str:
        """The key of the row in the results."""
        return f"{self.experiment} b{self.batch}"

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers of this experiment."""
        if "peer" not in self.seconds:
            return ()
        return ("llama", "llama-documents") if self.experiment.startswith("llama") else ("xlstm",)


ROWS = (
    Row("xlstm_160m", 16, 16, {"log": 100, "step": 60, "peer": 60}),
    Row("xlstm_400m", 16, 8, {"log": 180, "step": 90, "peer": 80}),
    Row("xlstm_830m", 8, 8, {"log": 160, "step": 100, "peer": 80}),
    Row("xlstm_1_4b", 8, 4, {"log": 200, "step": 130, "peer": 90}),
    Row("llama_160m", 16, 16, {"log": 90, "step": 50, "peer": 70}),
    Row("llama_1_4b", 8, 8, {"log": 180, "step": 110, "peer": 120}),
    Row("paper_125m", 32, 0, {"log": 120}),
    Row("paper_125m_7_1", 32, 0, {"log": 150}),
    Row("paper_350m", 32, 0, {"log": 180}),
    Row("paper_350m_7_1", 32, 0, {"log": 200}),
    Row("paper_350m_llama", 32, 0, {"log": 120}),
    Row("llama_400m", 16, 0, {"log": 130}),
    Row("llama_830m", 8, 0, {"log": 150}),
    Row("llama_2_7b", 4, 0, {"log": 250}),
    Row("xlstm_2_7b", 4, 0, {"log": 300}),
    Row("xlstm_7b", 1, 0, {"log": 300}),
)
"""The targets of the project first, then what else there is a recipe for."""


class Results(Protocol):
    """The measurements of a day."""

    date: str
    values: dict[str, Any]

    def get(self, row: Row, part: str) -> Entry:
        """Return a measurement; nothing if there is none."""
        ...


def render_page(results: Results) -> str:
    """Return the page of what was measured so far."""
    machine = results.values.get("machine", {})
    rows = [row for row in ROWS if row.name in results.values.get("rows", {})]
    parts = [
        f"# Training throughput on one GPU, {results.date}",
        "Command: `xlstm-jax bench gpu`. "
        f"Tokens/s are the median of the training log after step {FIRST_STEP}, up to step {LAST_STEP}, of runs as "
        "shipped: nothing is set but the batch size and `data=synthetic`, which draws random tokens in packed "
        "documents of about 1000 tokens. MFU takes the FLOPs that the trainer counts, 6N-MFU six FLOPs per parameter "
        "and token. MFU counts attention over all pairs of positions, so a kernel that skips pairs, of later positions "
        "or of other documents, raises it; 6N-MFU leaves attention out. The first step is counted from the start of "
        "the process, with an empty compilation cache. The ratio to the peer takes the fastest of them that does not "
        "separate documents.",
        "\n".join(f"- {name}: {value}" for name, value in machine.items()),
        table(COLUMNS, [cells(results, row) for row in rows]),
    ]
    if any(results.get(row, f"peer:{peer}") for row in rows for peer in row.peers):
        peers = [peer_cells(row, results.get(row, f"peer:{peer}"), peer) for row in rows for peer in row.peers]
        parts += ["## PyTorch peers", PEER_NOTES, table(PEER_COLUMNS, [line for line in peers if line])]
    if startups := [
        (row, results.get(row, "log")["startup"]) for row in rows if results.get(row, "log").get("startup")
    ]:
        parts += ["## Startup", "\n".join(f"- {row.name}: {text}" for row, text in startups)]
    parts += ["## Commands", "\n".join(f"- {line}" for line in describe_commands(results, rows))]
    missing = [
        f"{row.name} ({part})"
        for row in ROWS
        for part in ("log", "step")
        if part in row.seconds and not results.get(row, part)
    ]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.")
    return "\n\n".join(part for part in parts if part) + "\n"


COLUMNS = (
    "experiment",
    "batch",
    "settings chosen",
    "tokens/s (log)",
    "bare step",
    "log / bare",
    "MFU",
    "6N-MFU",
    "header, GiB",
    "peak, GiB",
    "first step, s",
    "peer, tokens/s",
    "log / peer",
)
PEER_COLUMNS = (
    "experiment",
    "peer",
    "batch",
    "parameters",
    "tokens/s",
    "peak, GiB",
    "first two steps, s",
    "did not fit",
)
PEER_NOTES = (
    "`xlstm`: `xLSTMLarge` of the package xlstm with mlstm-kernels (`xl_chunk`, chunks of 128), which does not "
    "separate documents. `llama`: plain PyTorch, attention by cuDNN, documents not separated; `llama-documents`: "
    "`flex_attention` within documents. All with `torch.compile`, autocast to bfloat16, parameters and fused AdamW in "
    "float32, clipping. Shapes are those of the recipes."
)


def cells(results: Results, row: Row) -> list[str]:
    """Return the cells of a row of the table."""
    log, step = results.get(row, "log"), results.get(row, "step")
    bare = step["rows"][0]["tokens_per_second"] if "rows" in step else None
    rate, peer = log.get("tokens_per_second"), best_peer(results, row)
    if "error" in log:
        log = log | {"settings": f"error: {log['error']}"}
    bare_text = f"error: {step['error']}" if "error" in step else number(bare, ",.0f")
    return [
        row.experiment,
        str(row.batch),
        log.get("settings", "-"),
        number(rate, ",.0f"),
        bare_text,
        ratio(rate, bare, ".3f"),
        number(log.get("mfu"), ".3f"),
        number(log.get("mfu_6n"), ".3f"),
        number(log.get("header_gib"), ".1f"),
        number(log.get("peak_gib"), ".1f"),
        number(log.get("first_step_seconds"), ".0f"),
        number(peer, ",.0f"),
        ratio(rate, peer, ".2f"),
    ]


def peer_cells(row: Row, entry: Entry, peer: str) -> list[str]:
    """Return the cells of a peer; none if it was not measured."""
    if not entry:
        return []
    if "error" in entry:
        return [row.experiment, peer, "-", "-", f"error: {entry['error']}", "-", "-", "-"]
    return [
        row.experiment,
        peer,
        str(entry["batch"]),
        f"{entry['parameters']:,}",
        number(entry["tokens_per_second"], ",.0f"),
        number(entry["peak_gib"], ".1f"),
        number(entry["first_steps_seconds"], ".0f"),
        ", ".join(f"batch {size}" for size in entry["out_of_memory"]) or "-",
    ]


def best_peer(results: Results, row: Row) -> float | None:
    """Return the tokens/s of the fastest peer that does not separate documents."""
    names = [peer for peer in row.peers if not peer.endswith("-documents")]
    rates = [results.get(row, f"peer:{peer}").get("tokens_per_second", 0) for peer in names]
    return max(rates, default=0) or None


def describe_commands(results: Results, rows: Sequence[Row]) -> Iterator[str]:
    """Yield what was run for each row."""
    for row in rows:
        for part, entry in results.values["rows"][row.name].items():
            if "command" in entry:
                end = "; steps {} to {} of the log".format(*entry["steps"]) if part == "log" else ""
                yield f"{row.name}, {part}: `{entry['command']}`{end}"


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [columns, ["---"] * len(columns), *lines]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows)


def number(value: float | None, form: str) -> str:
    """Return a number as text, or a dash."""
    return "-" if value is None else format(value, form)


def ratio(value: float | None, base: float | None, form: str) -> str:
    """Return a ratio as text, or a dash."""
    return "-" if not value or not base else format(value / base, form)


def render_chart(results: Results) -> str | None:
    """Draw the 6N-MFU of each experiment and its peer, labelled with their tokens/s, if anything was measured."""
    groups = {}
    for row in ROWS:
        log, peer = results.get(row, "log"), best_peer(results, row)
        if not row.peers or not log.get("mfu_6n"):
            continue
        # Both have the same parameters, so that shares are in the ratio of rates.
        rates = {"xlstm_jax": log["tokens_per_second"], "PyTorch peer": peer}
        groups[f"{row.experiment}, b{row.batch}"] = [
            Bar(series, share := log["mfu_6n"] * rate / log["tokens_per_second"], f"{share:.2f} ({rate:,.0f} tokens/s)")
            for series, rate in rates.items()
            if rate
        ]
    gpu = results.values.get("machine", {}).get("GPU", "GPU").partition(",")[0]
    return bar_chart(f"Training on one {gpu}: 6N-MFU (tokens/s)", groups) if groups else None
