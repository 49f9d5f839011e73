"""Renders `kvctl status`, from the values that `--json` prints. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvd.cli.tables import GAP, headed
from kvd.host.units import format_bytes, format_duration
from protocol.segments import PrefixStoreStatus
from protocol.types import DaemonStatus, ModelInfo, ModelStatus, PrefixUse

_COLORS = {
    "ready": "green",
    "failed": "bold red",
    "backoff": "yellow",
    "draining": "yellow",
    "stopping": "yellow",
    "stopped": "dim",
}
_PRESSURE = {"warning": "yellow", "critical": "bold red"}
_LEVEL_COLORS = ("green", "yellow", "red")
"""Color of each precision level; levels beyond these have the last color."""
_COLUMNS = (
    *("MODEL", "STATE", "ROWS", "QUEUED", "PAUSED", "TOK/S", "KV", "LEVELS"),
    *("GRANTED", "MEMORY", "HITS", "PAGES", "CONTEXT", "ATTENTION", "PID", "SOURCE"),
)
_DROPPED = (
    *("SOURCE", "PID", "ATTENTION", "CONTEXT", "PAGES", "HITS", "MEMORY"),
    *("GRANTED", "LEVELS", "KV", "TOK/S", "PAUSED", "QUEUED", "ROWS"),
)
"""Columns that a narrow table omits, in this order."""
_FOLDED = {"MODEL": "bold", "SOURCE": ""}
"""Columns that wrap, with their style."""
_NAME_WIDTH, _SOURCE_WIDTH = 16, 24
"""Widths reserved for a long name and a long source."""
TEXTS = {"STATE", "LEVELS", "ATTENTION"}
"""Columns that are aligned left."""
_BAR_PERCENT = 18
"""Width of the budget's bar, in percent of the page."""
_TIGHT, _FULL = 0.85, 0.95
"""Shares of the budget at which its bar changes color."""


def status(value: DaemonStatus, width: int) -> RenderableType:
    parts: list[RenderableType] = [daemon(value), budget(value, width), *devices(value, width)]
    if addresses := [address for address in value.http if address.startswith("http:")]:
        parts.append(Text(f"http   {'  '.join(f'{address}/v1' for address in addresses)}"))
    if value.prefix_store is not None:
        parts.append(prefix_store(value.prefix_store))
    parts += [
        Text.assemble(("warning", "bold yellow"), f" {one.observed}; {one.advice}")
        for one in value.problems
    ]
    if value.unloaded:
        names = ", ".join(value.unloaded)
        parts.append(Text(f"unloaded, loaded by the next request: {names}", style="dim"))
    if not value.models and not value.unloaded:
        parts.append(Text("\nno models; load one with `kvctl load demo`", style="dim"))
        return Group(*parts)
    if value.models:
        parts += [Text(), _models(value.models, width)]
    parts += itertools.chain.from_iterable(map(_without_pages, value.models))
    parts += [Text.assemble("\n", error(model)) for model in value.models if model.error]
    return Group(*parts)


def model(value: ModelStatus, width: int) -> RenderableType:
    """Return the summary that `load` prints: one line, or two if one is too long."""
    # The effective scheme: calibration may have raised the requested one.
    scheme = value.info.kv_scheme if value.info else value.kv.name
    line = Text.assemble((value.name, "bold"), " ", state(value), f"  {scheme}")
    if value.info is None:
        return line
    facts = f"{model_facts(value.info)}, attention {value.info.attention_path}"
    if line.cell_len + len(facts) + GAP <= width:
        return line.append(f"  {facts}")
    return Group(line, Padding(Text(facts), (0, 0, 0, GAP)))


def model_facts(info: ModelInfo) -> str:
    return (
        f"{info.parameters / 1e6:.1f} M parameters, {info.dtype}, context {info.context_length}"
        f", on {info.device}"
    )


def _without_pages(value: ModelStatus) -> Iterator[Text]:
    """Yield a line about the layers that have no batched pages for a known reason, if any."""
    parts = value.info.kv if value.info else []
    if without := sum(part.layers for part in parts if part.reason):
        layers = sum(part.layers for part in parts)
        text = f"{without} of {layers} layers are not in batched pages; "
        hint = f"`kvctl status {value.name}` shows why"
        yield Text.assemble("\n", (f"{value.name}: ", "bold"), text, hint)


def daemon(value: DaemonStatus) -> Text:
    color = "green" if value.state == "serving" else "yellow"
    return Text.assemble(
        ("kvd ", "bold"),
        f"{value.version}  ",
        (value.state, color),
        f"  pid {value.pid}  up {format_duration(value.uptime_s)}  {value.home}",
    )


def devices(value: DaemonStatus, width: int) -> Iterator[Text]:
    """Yield a line for each GPU if there are several, and one for the host's memory."""
    cells = max(8, _BAR_PERCENT * width // 100)
    lines = [(f"GPU {number:<2}", one) for number, one in enumerate(value.devices)]
    if value.host_budget is not None:
        lines.append(("host  ", value.host_budget))
    for name, one in lines:
        share = one.granted_bytes / one.budget_bytes if one.budget_bytes else 0.0
        style = "cyan" if share < _TIGHT else "yellow" if share < _FULL else "red"
        line = Text.assemble(f"{name} ", bar(min(1.0, share), cells, style))
        line.append(f" {format_bytes(one.granted_bytes)} of {format_bytes(one.budget_bytes)}")
        yield line


def budget(value: DaemonStatus, width: int) -> Text:
    total, granted = value.budget_bytes, value.granted_bytes
    share = granted / total if total else 0.0
    style = "cyan" if share < _TIGHT else "yellow" if share < _FULL else "red"
    cells = max(8, _BAR_PERCENT * width // 100)
    line = Text.assemble("budget ", bar(min(1.0, share), cells, style))
    line.append(f" {format_bytes(granted)} of {format_bytes(total)}, ")
    if granted > total:
        above = format_bytes(granted - total)
        kept = sum(map(_kept_bytes, value.models)) > total
        outlook = "unpin or unload a model" if kept else "models give it back"
        line.append(f"{above} above the lowered budget; {outlook}", "yellow")
    else:
        line.append(f"{share:.0%}")
        line.append(f"  host {format_bytes(value.host.available)} free")
    if value.violations:
        line.append(f"  exceeded {value.violations} times: a bug, see the log", "bold red")
    if value.host.pressure != "normal":
        line.append(f"  pressure {value.host.pressure}", _PRESSURE[value.host.pressure])
    return line


def prefix_store(value: PrefixStoreStatus) -> Text:
    stored, limit = format_bytes(value.stored_bytes), format_bytes(value.limit_bytes)
    text = f"disk   {stored} of {limit} in {value.segments} stored prefixes"
    state = "" if value.state == "on" else f", {value.state}"
    return Text.assemble(text, (state, "yellow"))


def _kept_bytes(value: ModelStatus) -> int:
    """Return the part of a pinned model's grant that its rows cannot give back."""
    base = value.stats.reclaimable.base or value.granted_bytes
    return min(base, value.granted_bytes) if value.pinned else 0


def bar(share: float, cells: int, style: str) -> Text:
    """Return a bar of ``cells`` cells, filled up to a share; a share near 1 is rounded down."""
    filled = round(share * cells) if share < _FULL else int(share * cells)
    return Text.assemble(("█" * filled, style), ("░" * (cells - filled), "dim"))


def _models(models: list[ModelStatus], width: int) -> Table:
    rows = [cells(value) for value in models]
    table = headed()
    columns = fitting(rows, width)
    for name, size in columns.items():
        if name in _FOLDED:
            table.add_column(name, overflow="fold", style=_FOLDED[name], min_width=size)
        else:
            table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def fitting(
    rows: list[dict[str, str | Text]], width: int, min_widths: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the columns that fit, by importance, with their widths.

    Names and sources get a limited width; longer ones wrap or are cut.
    """
    sizes = {
        name: max(cell_len(name), *(cell_len(str(row[name])) for row in rows)) for name in _COLUMNS
    }
    sizes["MODEL"] = min(sizes["MODEL"], _NAME_WIDTH)
    sizes["SOURCE"] = min(sizes["SOURCE"], _SOURCE_WIDTH)
    for name, size in (min_widths or {}).items():
        sizes[name] = max(sizes[name], size)
    columns = [name for name in _COLUMNS if any(str(row[name]) for row in rows)]
    for name in _DROPPED:
        if sum(sizes[column] + GAP for column in columns) <= width:
            break
        if name in columns:
            columns.remove(name)
    return {name: sizes[name] for name in columns}


def cells(value: ModelStatus) -> dict[str, str | Text]:
    stats, info = value.stats, value.info
    waiting = queued(value)
    return {
        "MODEL": value.name,
        "STATE": state(value),
        "ROWS": str(rows(value)),
        "QUEUED": Text(str(waiting), "yellow") if waiting else "",
        "PAUSED": Text(str(value.paused), "yellow") if value.paused else "",
        "TOK/S": f"{stats.tokens_per_s:.0f}",
        "KV": format_bytes(kv_bytes(value)),
        "LEVELS": levels(value),
        "MEMORY": format_bytes(stats.memory.footprint),
        "GRANTED": format_bytes(value.granted_bytes),
        "HITS": hit_rate(stats.prefix),
        "PAGES": f"{stats.pages_used}/{stats.pages_total}",
        "CONTEXT": str(info.context_length) if info else "",
        "ATTENTION": info.attention_path if info else "",
        "PID": str(value.worker_pid or ""),
        "SOURCE": "" if value.source == value.name else Text(value.source),
    }


def rows(value: ModelStatus) -> int:
    """Return the number of rows that prefill or decode."""
    return value.stats.rows_running + value.stats.rows_prefilling


def kv_bytes(value: ModelStatus) -> int:
    """Return the bytes of pages in use and of tails."""
    return value.stats.memory.kv_pages_used + value.stats.memory.kv_tails


def queued(value: ModelStatus) -> int:
    """Return the number of requests that wait, without the paused ones."""
    waiting = value.stats.rows_waiting if value.state == "ready" else value.requests
    return max(0, waiting - value.paused)


def schemes(value: ModelStatus) -> list[str]:
    if value.info and value.info.kv_schemes:
        return value.info.kv_schemes
    return [value.kv.name, *(step.name for step in value.kv.steps)]


def levels(value: ModelStatus) -> Text:
    """Return the shares of a model's pages by scheme; without pages, the scheme of new rows."""
    counts = value.stats.memory.kv_levels
    total = sum(counts)
    if not total:
        return Text(value.info.kv_scheme if value.info else value.kv.name, "dim")
    shares = [
        Text(
            f"{name} {count / total:.0%}" if count < total else name,
            _LEVEL_COLORS[min(number, len(_LEVEL_COLORS) - 1)],
        )
        for number, (name, count) in enumerate(zip(schemes(value), counts, strict=False))
        if count
    ]
    return Text(" ").join(shares)


def hit_rate(use: PrefixUse) -> str:
    """Return the share of prompt tokens that were not prefilled; empty without prompts."""
    found = use.hit_tokens + use.disk_tokens
    return f"{found / use.query_tokens:.0%}" if use.query_tokens else ""


def state(value: ModelStatus) -> Text:
    text = Text(value.state, style=_COLORS.get(value.state, "cyan"))
    if value.restarts:
        text.append(f" ↻{value.restarts}", style="yellow")
    if value.pinned:
        text.append(" pinned", style="dim")
    return text


def error(value: ModelStatus) -> Text:
    assert value.error is not None
    style = "red" if value.state == "failed" else "yellow"
    message = value.error.message
    name = "" if value.name in message else f"{value.name}: "
    return Text.assemble((name, "bold"), (message, style))
