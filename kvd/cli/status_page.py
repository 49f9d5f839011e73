"""Tables for people, from the values that `--json` prints. Pure: values in, renderables out."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvd.host.units import format_bytes, format_duration
from protocol.types import DaemonStatus, ModelInfo, ModelStatus, PrefixUse

_COLOURS = {
    "ready": "green",
    "failed": "bold red",
    "backoff": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "stopped": "dim",
}
_PRESSURE = {"warning": "yellow", "critical": "bold red"}
_LEVELS = ("green", "yellow", "red")
"""Of the ladder's rungs, from its top down; what is below has the last one."""
_COLUMNS = (
    *("MODEL", "STATE", "ROWS", "WAIT", "PARKED", "TOK/S", "KV", "LEVELS"),
    *("GRANTED", "MEMORY", "HITS", "PAGES", "CONTEXT", "ATTENTION", "PID", "SOURCE"),
)
_DROPPED = (
    *("SOURCE", "PID", "ATTENTION", "CONTEXT", "PAGES", "HITS", "MEMORY"),
    *("GRANTED", "LEVELS", "KV", "TOK/S", "PARKED", "WAIT", "ROWS"),
)
"""What is left out where it does not fit, in this order."""
_FOLDED = {"MODEL": "bold", "SOURCE": ""}
"""Columns that wrap, with their style."""
_NAME, _SOURCE = 16, 24
"""Cells that a name and a source have at least, if they need them."""
GAP = 2
TEXTS = {"STATE", "LEVELS", "ATTENTION"}
"""Columns that are no numbers."""
_BAR = 18
"""Cells of the budget's bar, of each hundred of the width."""
_TIGHT, _FULL = 0.85, 0.95
"""Shares of the budget from which on its bar changes colour."""


def status(value: DaemonStatus, width: int) -> RenderableType:
    """Return all of `kvctl status`."""
    parts: list[RenderableType] = [daemon(value), budget(value, width)]
    if addresses := [address for address in value.http if address.startswith("http:")]:
        parts.append(Text(f"http   {'  '.join(f'{address}/v1' for address in addresses)}"))
    if value.unloaded:
        names = ", ".join(value.unloaded)
        parts.append(Text(f"not loaded, until a request names them: {names}", style="dim"))
    if not value.models and not value.unloaded:
        parts.append(Text("\nno models; load one with `kvctl load demo`", style="dim"))
        return Group(*parts)
    if value.models:
        parts += [Text(), _models(value.models, width)]
    parts += [_without_pages(model) for model in value.models if _odd_layers(model)]
    parts += [trouble(model) for model in value.models if model.error]
    return Group(*parts)


def model(value: ModelStatus, width: int) -> RenderableType:
    """Return what `load` says of a model: a line, or two where one is too long."""
    # What it got: a calibration may have lifted what was asked for.
    scheme = value.info.kv_scheme if value.info else value.kv.name
    line = Text.assemble((value.name, "bold"), " ", state(value), f"  {scheme}")
    if value.info is None:
        return line
    facts = f"{model_facts(value.info)}, attention {value.info.attention_path}"
    if line.cell_len + len(facts) + GAP <= width:
        return line.append(f"  {facts}")
    return Group(line, Padding(Text(facts), (0, 0, 0, GAP)))


def model_facts(info: ModelInfo) -> str:
    """Return what a loaded model is, in half a line."""
    return (
        f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, context {info.context_length}"
        f", on {info.device}"
    )


def _odd_layers(value: ModelStatus) -> int:
    """Return how many layers are served in another way than pages, and for a reason."""
    return sum(part.layers for part in value.info.kv if part.reason) if value.info else 0


def _without_pages(value: ModelStatus) -> Text:
    assert value.info is not None
    layers = sum(part.layers for part in value.info.kv)
    text = f"{_odd_layers(value)} of {layers} layers are not in batched pages; "
    return Text.assemble(
        "\n", (f"{value.name}: ", "bold"), text, f"`kvctl status {value.name}` says why"
    )


def daemon(value: DaemonStatus) -> Text:
    """Return the line about the daemon itself."""
    colour = "green" if value.state == "serving" else "yellow"
    return Text.assemble(
        ("kvd ", "bold"),
        f"{value.version}  ",
        (value.state, colour),
        f"  pid {value.pid}  up {format_duration(value.uptime_s)}  {value.home}",
    )


def budget(value: DaemonStatus, width: int) -> Text:
    """Return the line about the budget: what is granted of it, and what the machine has left."""
    total, granted = value.budget_bytes, value.granted_bytes
    share = granted / total if total else 0.0
    style = "cyan" if share < _TIGHT else "yellow" if share < _FULL else "red"
    line = Text.assemble("budget ", bar(min(1.0, share), max(8, _BAR * width // 100), style))
    line.append(f" {format_bytes(granted)} of {format_bytes(total)}, {share:.0%}")
    if granted > total:
        line.append(f"  {format_bytes(granted - total)} over, being worked off", "yellow")
    else:
        line.append(f"  host {format_bytes(value.host.available)} free")
    if value.violations:
        line.append(f"  exceeded {value.violations} times: a bug, see the log", "bold red")
    if value.host.pressure != "normal":
        line.append(f"  pressure {value.host.pressure}", _PRESSURE[value.host.pressure])
    return line


def bar(share: float, cells: int, style: str) -> Text:
    """Return a bar of so many cells, filled up to a share."""
    filled = round(share * cells) if share < _FULL else int(share * cells)
    return Text.assemble(("█" * filled, style), ("░" * (cells - filled), "dim"))


def _models(models: list[ModelStatus], width: int) -> Table:
    rows = [cells(value) for value in models]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    shown = fitting(rows, width)
    for name, size in shown.items():
        if name in _FOLDED:
            table.add_column(name, overflow="fold", style=_FOLDED[name], min_width=size)
        else:
            table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    return table


def fitting(
    rows: list[dict[str, str | Text]], width: int, least: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return as many columns as fit, the less important ones left out first, and their cells.

    Of names and sources those are what they need at least: longer ones wrap, or are cut.
    """
    sizes = {
        name: max(cell_len(name), *(cell_len(str(row[name])) for row in rows)) for name in _COLUMNS
    }
    sizes["MODEL"] = min(sizes["MODEL"], _NAME)
    sizes["SOURCE"] = min(sizes["SOURCE"], _SOURCE)
    for name, size in (least or {}).items():
        sizes[name] = max(sizes[name], size)
    shown = [name for name in _COLUMNS if any(str(row[name]) for row in rows)]
    for name in _DROPPED:
        if sum(sizes[name] + GAP for name in shown) <= width:
            break
        if name in shown:
            shown.remove(name)
    return {name: sizes[name] for name in shown}


def cells(value: ModelStatus) -> dict[str, str | Text]:
    """Return the cells of a model's row by column."""
    stats, info, memory = value.stats, value.info, value.stats.memory
    waits = waiting(value)
    return {
        "MODEL": value.name,
        "STATE": state(value),
        "ROWS": str(stats.rows_running + stats.rows_prefilling),
        "WAIT": Text(str(waits), "yellow") if waits else "",
        "PARKED": Text(str(value.paused), "yellow") if value.paused else "",
        "TOK/S": f"{stats.tokens_per_s:.0f}",
        "KV": format_bytes(memory.kv_pages_used + memory.kv_tails),
        "LEVELS": levels(value),
        "MEMORY": format_bytes(memory.footprint),
        "GRANTED": format_bytes(value.granted_bytes),
        "HITS": share_of_hits(stats.prefix),
        "PAGES": f"{stats.pages_used}/{stats.pages_total}",
        "CONTEXT": str(info.context_length) if info else "",
        "ATTENTION": info.attention_path if info else "",
        "PID": str(value.worker_pid or ""),
        "SOURCE": "" if value.source == value.name else Text(value.source),
    }


def waiting(value: ModelStatus) -> int:
    """Return how many requests of a model wait, but for those that are parked."""
    there = value.stats.rows_waiting if value.state == "ready" else value.requests
    return max(0, there - value.paused)


def schemes(value: ModelStatus) -> list[str]:
    """Return the schemes that a model's pages may have, from the top down."""
    if value.info and value.info.kv_schemes:
        return value.info.kv_schemes
    return [value.kv.name, *(step.name for step in value.kv.steps)]


def levels(value: ModelStatus) -> Text:
    """Return which levels of the ladder a model's pages are on; with none, where rows start."""
    held = value.stats.memory.kv_levels
    total = sum(held)
    if not total:
        return Text(value.info.kv_scheme if value.info else value.kv.name, "dim")
    found = [
        (f"{name} {count / total:.0%}" if count < total else name, style_of_level(number))
        for number, (name, count) in enumerate(zip(schemes(value), held, strict=False))
        if count
    ]
    return Text(" ").join(Text(text, style) for text, style in found)


def style_of_level(number: int) -> str:
    """Return a level's colour."""
    return _LEVELS[min(number, len(_LEVELS) - 1)]


def share_of_hits(use: PrefixUse) -> str:
    """Return how much of the prompts was found in the cache; nothing if there were none."""
    return f"{use.hit_tokens / use.query_tokens:.0%}" if use.query_tokens else ""


def state(value: ModelStatus) -> Text:
    """Return a model's state in its colour, with the restarts there were."""
    text = Text(value.state, style=_COLOURS.get(value.state, "cyan"))
    if value.restarts:
        text.append(f" ↻{value.restarts}", style="yellow")
    if value.pinned:
        text.append(" pinned", style="dim")
    return text


def trouble(value: ModelStatus) -> Text:
    """Return why a model failed, or is in backoff, after an empty line."""
    return Text("\n").append_text(trouble_line(value))


def trouble_line(value: ModelStatus) -> Text:
    """Return the same in a line."""
    assert value.error is not None
    style = "red" if value.state == "failed" else "yellow"
    message = value.error.message
    whose = "" if value.name in message else f"{value.name}: "
    return Text.assemble((whose, "bold"), (message, style))
