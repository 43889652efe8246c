"""Tables of plans and searches for the terminal, 80 to 100 columns wide."""

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from xlstm_jax.planning.memory import Parameter
from xlstm_jax.planning.plan import Plan
from xlstm_jax.planning.search import SearchResult, mesh_text

GIB = 2**30
HOUR = 3600


def render(plan: Plan, *, sharding: bool = False) -> RenderableType:
    """Format a plan.

    Args:
        plan: The plan.
        sharding: Whether to list the sharding of every parameter.

    Returns:
        A renderable for a rich console.
    """
    parts: list[RenderableType] = [_run_table(plan), "", _memory_table(plan), "", _time_table(plan), "", _notes(plan)]
    if sharding:
        parts += ["", _sharding_table(plan.parameters)]
    return Group(*parts)


def render_search(result: SearchResult, target_memory: int | float) -> RenderableType:
    """Format the result of a search: the compiled candidates and the verdict."""
    table = _table("Compiled, cheapest first", "mesh", "remat", "accumulation", "step", "GiB", "")
    for candidate in result.tried:
        if candidate.compiled is not None:
            table.add_row(
                mesh_text(candidate.axis_sizes),
                candidate.remat,
                str(candidate.accumulation),
                _seconds(candidate.seconds),
                f"{candidate.compiled / GIB:,.2f}",
                "[green]fits[/]" if candidate == result.found else "too large",
            )
    verdict = _verdict(result, target_memory)
    return Group(table, "", verdict) if table.row_count else verdict


def _verdict(result: SearchResult, target_memory: int | float) -> str:
    target = f"{target_memory / GIB:,.2f} GiB"
    if result.found is not None:
        return f"The cheapest of {result.num_candidates} that fits into {target}: [bold]{result.found}[/]."
    is_known = any(candidate.compiled is not None for candidate in result.tried)
    miss = ""
    if result.smallest_miss is not None:
        miss = f" The best misses it by {'' if is_known else 'at least '}{result.smallest_miss / GIB:,.2f} GiB."
    if not result.is_complete:
        return (
            f"None of those that were compiled fits into {target}.{miss} Dearer ones were left out: allow more "
            "compilations."
        )
    return (
        f"None of {result.num_candidates} fits into {target}; the state alone is too large for {result.num_too_large}."
        f"{miss} Use more devices, or a smaller batch or context."
    )


def _run_table(plan: Plan) -> Table:
    table = _table("Run")
    per_token = plan.flops.model / plan.tokens_per_step
    again = plan.flops.recomputed / plan.flops.executed
    rows = {
        "model": f"{plan.model}, {plan.num_parameters:,} parameters",
        "devices": f"{plan.num_devices} × {plan.accelerator.name}: {mesh_text(plan.axis_sizes)}",
        "batch": f"{plan.batch_size:,} × {plan.context_length:,} = {plan.tokens_per_step:,} tokens, "
        f"accumulation {plan.accumulation}",
        "remat": plan.remat,
        **({"performance": plan.performance} if plan.performance else {}),
        "FLOPs of a step": f"{plan.flops.model:.3g} of the model ({per_token:.3g} for a token), "
        f"{plan.flops.executed:.3g} executed ({again:.0%} recomputed)",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("Memory of a device", "part", "GiB", "how it is known")
    persistent = plan.persistent
    method = "traced" if plan.estimated is None else "by formula"
    rows = [
        ("parameters", persistent.parameters, "exact"),
        ("optimizer state", persistent.optimizer, "exact"),
        ("batch, metrics and other state", persistent.batch + persistent.other, "exact"),
        ("saved by the forward pass", plan.activations, f"{method}, for one minibatch, remat {plan.remat}"),
        ("gradients", plan.gradients, "as large as parameters"),
        ("logits of a chunk", plan.logits, method),
    ]
    for name, size, source in rows:
        table.add_row(name, f"{size / GIB:,.2f}", source)
    share = plan.memory / plan.accelerator.memory
    color = "red" if share > 1 else "green"
    table.add_row(
        "[bold]needed[/]",
        f"[bold]{plan.memory / GIB:,.2f}[/]",
        f"{_source(plan)}: [{color}]{share:.0%}[/] of {plan.accelerator.memory / GIB:,.1f} GiB",
    )
    return table


def _source(plan: Plan) -> str:
    """Describe the source of the memory figure."""
    if plan.compiled is not None and plan.memory == plan.compiled.peak:
        return f"as compiled for {plan.compiled.device_kind}"
    return "at least; nothing was compiled" if plan.estimated is None else "estimated by formula"


def _time_table(plan: Plan) -> Table:
    table = _table("Time of a step, estimated")
    time = plan.time
    sent = ", ".join(f"{axes} {volume / GIB:,.2f} GiB" for axes, volume in plan.communication.items() if volume > 0)
    rows = {
        "computation": _seconds(time.compute),
        "optimizer": _seconds(time.optimizer),
        "communication": f"{_seconds(time.communication)}" + (f"; a device sends: {sent}" if sent else ""),
        "[bold]step[/]": f"[bold]{_seconds(time.total)}[/]; {_seconds(time.overlapped)} with communication hidden",
        "tokens a second": f"{plan.tokens_per_second:,.0f}, {plan.tokens_per_second / plan.num_devices:,.0f} for each "
        f"device; MFU {plan.mfu:.0%}, 6N-MFU {plan.mfu_6n:.0%}",
    }
    if plan.num_steps is not None and plan.seconds is not None:
        rows["run"] = (
            f"{plan.num_steps:,} steps, {plan.num_steps * plan.tokens_per_step:.3g} tokens: "
            f"{_duration(plan.seconds)}, {plan.seconds * plan.num_devices / HOUR:,.1f} device-hours"
        )
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _notes(plan: Plan) -> str:
    shares = plan.assumptions
    return (
        f"[dim]Assumed: {shares.compute:.0%} of the peak FLOPs, {shares.memory:.0%} of the bandwidth of the memory, "
        f"{shares.links:.0%} of that of links; rings within nodes of {plan.accelerator.devices_per_node} devices at "
        f"{plan.accelerator.link_bandwidth / 1e9:,.0f} GB/s, beyond at {plan.accelerator.network_bandwidth / 1e9:,.0f} "
        "GB/s for each device; nothing overlaps. Validation and checkpoints come on top.[/]"
    )


def _sharding_table(parameters: Iterable[Parameter]) -> Table:
    table = _table("Parameters", "name", "shape", "dtype", "split over", "MiB on a device")
    table.columns[-1].justify = "right"
    for parameter in parameters:
        split = ", ".join("+".join(axes) or "-" for axes in parameter.spec) if parameter.axes else "-"
        shape = " × ".join(map(str, parameter.shape))
        table.add_row(escape(parameter.name), shape, parameter.dtype, split, f"{parameter.num_bytes / 2**20:,.2f}")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=bool(columns)
    )
    for column in columns:
        table.add_column(column, header_style="dim", overflow="fold", justify="right" if column == "GiB" else "left")
    return table


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _duration(seconds: float) -> str:
    days, rest = divmod(seconds, 24 * HOUR)
    hours, rest = divmod(rest, HOUR)
    return f"{days:.0f} d {hours:.0f} h" if days else f"{hours:.0f} h {rest // 60:.0f} min"
