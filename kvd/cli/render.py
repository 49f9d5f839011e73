"""Tables for people, from the values that `--json` prints. Pure: values in, renderables out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.units import format_bytes, format_duration
from protocol.types import DaemonStatus, ModelStatus

WIDE = 120
"""From this many columns on, the table has all of them."""

_COLOURS = {
    "ready": "green",
    "failed": "bold red",
    "backoff": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "stopped": "dim",
}
_PRESSURE = {"warning": "yellow", "critical": "bold red"}
_TEXTS = {"STATE", "KV", "ATTENTION"}
"""Columns that are no numbers."""
_BAR = 20
"""Cells of the budget's bar."""


def status(value: DaemonStatus, width: int) -> RenderableType:
    """Return all of `kvctl status`."""
    parts: list[RenderableType] = [_daemon(value), _memory(value)]
    if not value.models:
        parts.append(Text("\nno models; load one with `kvctl load demo`", style="dim"))
        return Group(*parts)
    parts += [Text(), _models(value.models, wide=width >= WIDE)]
    parts += [_trouble(model) for model in value.models if model.error]
    return Group(*parts)


def model(value: ModelStatus) -> Text:
    """Return one line about a model, as `load` says it."""
    line = Text.assemble((value.name, "bold"), " ", _state(value), f"  {value.kv.name}")
    if value.info:
        info = value.info
        line.append(f"  {info.parameters / 1e6:.1f} M parameters, {info.dtype}")
        line.append(f", context {info.context_length}, attention {info.attention_path}")
        line.append(f", on {info.device}")
    return line


def _daemon(value: DaemonStatus) -> Text:
    colour = "green" if value.state == "serving" else "yellow"
    return Text.assemble(
        ("kvd ", "bold"),
        f"{value.version}  ",
        (value.state, colour),
        f"  pid {value.pid}  up {format_duration(value.uptime_s)}  {value.home}",
    )


def _memory(value: DaemonStatus) -> Text:
    share = min(1.0, value.granted_bytes / value.budget_bytes) if value.budget_bytes else 0.0
    filled = round(share * _BAR)
    line = Text.assemble(
        "budget ",
        ("█" * filled, "cyan"),
        ("░" * (_BAR - filled), "dim"),
        f" {format_bytes(value.granted_bytes)} of {format_bytes(value.budget_bytes)}",
        f"  host {format_bytes(value.host.available)} free",
    )
    if value.host.pressure != "normal":
        line.append(f"  pressure {value.host.pressure}", _PRESSURE[value.host.pressure])
    return line


def _models(models: list[ModelStatus], *, wide: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("MODEL", overflow="fold", style="bold", no_wrap=wide)
    names = ["STATE", "KV", "ROWS", "PAGES", "TOK/S", "MEMORY"]
    if wide:
        names += ["GRANTED", "KV USED", "CONTEXT", "ATTENTION", "PID"]
    for name in names:
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=True)
    if wide:
        table.add_column("SOURCE", overflow="fold")
    for value in models:
        table.add_row(*_cells(value), *(_more(value) if wide else ()))
    return table


def _cells(value: ModelStatus) -> list[RenderableType]:
    stats = value.stats
    rows = stats.rows_running + stats.rows_prefilling
    waiting = f"+{stats.rows_waiting}" if stats.rows_waiting else ""
    return [
        value.name,
        _state(value),
        value.info.kv_scheme if value.info else value.kv.name,
        f"{rows}{waiting} (max {stats.max_rows_in_step})",
        f"{stats.pages_used}/{stats.pages_total}",
        f"{stats.tokens_per_s:.0f}",
        format_bytes(stats.memory.footprint),
    ]


def _more(value: ModelStatus) -> list[RenderableType]:
    info, memory = value.info, value.stats.memory
    return [
        format_bytes(value.granted_bytes),
        format_bytes(memory.kv_pages_used + memory.kv_tails),
        str(info.context_length) if info else "",
        info.attention_path if info else "",
        str(value.worker_pid or ""),
        value.source,
    ]


def _state(value: ModelStatus) -> Text:
    text = Text(value.state, style=_COLOURS.get(value.state, "cyan"))
    if value.restarts:
        text.append(f" ↻{value.restarts}", style="yellow")
    return text


def _trouble(value: ModelStatus) -> Text:
    assert value.error is not None
    style = "red" if value.state == "failed" else "yellow"
    message = value.error.message
    whose = "" if value.name in message else f"{value.name}: "
    return Text.assemble("\n", (whose, "bold"), (message, style))
