"""The page of `kvctl status MODEL`: what it is, how it keeps its KV cache, and its memory.

Pure: values in, renderables out.
"""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.cli import status_page
from kvd.host.units import format_bytes
from protocol.types import (
    FusedAttention,
    KVPart,
    KVSpec,
    MemoryUse,
    ModelInfo,
    ModelStatus,
    PrefixUse,
)

_GAP = 2


def page(value: ModelStatus) -> RenderableType:
    """Return all that is known of one model."""
    lines: list[tuple[str, str]] = [("source", value.source)]
    if info := value.info:
        lines.append(("model", f"{info.architecture}, {status_page.model_facts(info)}"))
        lines.append(("attention", f"{info.attention_path}, error {info.attention_error:.2g}"))
        if info.fused:
            lines.append(("", _kernels(info.fused)))
    lines.append(("KV cache", _settings(value.kv, info)))
    if info:
        size = f"; a page of 64 tokens: {format_bytes(info.page_bytes)}" if info.page_bytes else ""
        lines.append(("", info.kv_layout + size))
    lines += _memory(value.stats.memory, value.granted_bytes)
    lines += _rows(value)
    if value.kv.prefix_cache and info:
        lines.append(("prompts", _prompts(value.stats.prefix)))
    parts: list[RenderableType] = [_head(value), _pairs(lines)]
    if info and info.kv:
        parts += [Text(), _parts(info.kv), *_reasons(info.kv)]
    if value.error:
        parts.append(status_page.trouble(value))
    return Group(*parts)


def _kernels(fused: FusedAttention) -> str:
    said = "kernels" if fused.used else f"without kernels: {fused.reason}"
    if fused.layers:
        said += f" ({fused.layers} whole layers)"
    if fused.call_ms is not None and fused.reference_ms is not None:
        said += f", {fused.call_ms:.2g} ms a layer against {fused.reference_ms:.2g} ms"
    return said


def _head(value: ModelStatus) -> Text:
    line = Text.assemble((value.name, "bold"), "  ", status_page.state(value))
    if value.worker_pid:
        line.append(f"  pid {value.worker_pid}")
    return line


def _pairs(lines: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in lines:
        table.add_row(name, Text(text))
    return table


def _settings(kv: KVSpec, info: ModelInfo | None) -> str:
    top, *rest = (info.kv_schemes if info else []) or [kv.name, *(one.name for one in kv.steps)]
    steps = ", ".join(rest)
    said = [f"{top}, may step down to {steps}" if steps else f"{top}, never steps down"]
    if info and info.kv_calibrated:
        said.append(f"calibrated: not below {info.kv_calibrated}")
    floors = sorted(kv.floors.items(), key=lambda floor: (floor[0] < 0, floor[0]))
    said += [f"layer {layer} not below {kv.scheme_of(name).name}" for layer, name in floors]
    if kv.quantized_kv_start:
        said.append(f"dense until {kv.quantized_kv_start} tokens")
    if kv.max_kv_size is not None:
        first = f", the first {kv.keep} among them" if kv.keep else ""
        said.append(f"at most {kv.max_kv_size} tokens{first}")
    if kv.prefix_cache:
        said.append(f"up to {format_bytes(kv.prefix_cache)} of prompts for later ones")
    return "; ".join(said)


def _memory(use: MemoryUse, granted: int) -> list[tuple[str, str]]:
    kinds = (
        ("weights", use.weights),
        ("pages", use.kv_pages),
        ("tails", use.kv_tails),
        ("scratch", use.scratch),
    )
    text = ", ".join(f"{name} {format_bytes(count)}" for name, count in kinds if count)
    whole = f"{format_bytes(use.footprint)} of {format_bytes(granted)} granted"
    return [("memory", f"{whole}: {text}" if text else whole)]


def _rows(value: ModelStatus) -> list[tuple[str, str]]:
    stats = value.stats
    parts = [
        f"{stats.rows_running} running" if stats.rows_running else "",
        f"{stats.rows_prefilling} reading prompts" if stats.rows_prefilling else "",
        f"{waits} waiting" if (waits := status_page.waiting(value)) else "",
        f"{value.paused} parked" if value.paused else "",
    ]
    said = ", ".join(part for part in parts if part) or "none"
    if stats.max_rows_in_step:
        said += f"; at most {stats.max_rows_in_step} in a step so far"
    if stats.reclaimable.level:
        said += f"; new ones start at {status_page.schemes(value)[stats.reclaimable.level]}"
    return [("rows", said), ("pages", _pages(value))]


def _pages(value: ModelStatus) -> str:
    stats = value.stats
    said = f"{stats.pages_used} of {stats.pages_total} used"
    return f"{said}, on {status_page.levels(value).plain}" if sum(stats.memory.kv_levels) else said


def _prompts(use: PrefixUse) -> str:
    """Return what came of remembering prompts; hits are counted in tokens."""
    share = status_page.share_of_hits(use)
    found = f"{use.hit_tokens} of {use.query_tokens} tokens found in the cache"
    held = f"{_count(use.checkpoints, 'checkpoint')} in {format_bytes(use.held)}"
    gone = f", {use.evicted} made room for others" if use.evicted else ""
    return f"{found}{f' ({share})' if share else ''}; {held}{gone}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _parts(parts: list[KVPart]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("LAYERS", overflow="fold")
    table.add_column("KEPT AS", overflow="fold")
    table.add_column("SCHEME", overflow="fold")
    table.add_column("ROWS", no_wrap=True)
    table.add_column("BYTES", no_wrap=True)
    digits = max(len(str(part.layers)) for part in parts)
    for part in parts:
        layers = f"{part.layers:>{digits}} × {part.kind}"  # noqa: RUF001 - read by people
        rows = "batched" if part.batched else "one"
        table.add_row(layers, Text(part.path), part.scheme, rows, _bytes(part))
    return table


def _bytes(part: KVPart) -> str:
    if part.bytes_per_token:
        return f"{format_bytes(part.bytes_per_token)}/token"
    return f"{format_bytes(part.bound_bytes)}/row" if part.bound_bytes else ""


def _reasons(parts: list[KVPart]) -> list[Text]:
    return [
        Text.assemble((part.kind, "bold"), f": {part.reason}", overflow="fold")
        for part in parts
        if part.reason
    ]
