"""Renders `kvctl status MODEL`: the model, its KV cache, its rows and its memory. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.cli import status_page
from kvd.cli.mixes import layer_schemes
from kvd.cli.tables import fixed_column, headed, named_values, text_column
from kvd.host.units import format_bytes
from protocol.embedding import EmbeddingInfo
from protocol.kv import KVSpec
from protocol.types import (
    ChatAbilities,
    FastPath,
    FusedAttention,
    KVPart,
    MemoryUse,
    ModelInfo,
    ModelStatus,
    PrefixUse,
    RankStatus,
)


def page(value: ModelStatus) -> RenderableType:
    lines: list[tuple[str, str]] = [("source", value.source)]
    if info := value.info:
        lines.append(("model", f"{info.architecture}, {status_page.model_facts(info)}"))
        lines += zip(("chat", ""), _abilities(info.chat), strict=False)
        lines += [("embeddings", text) for text in _embeddings(info.embedding)]
        lines.append(("attention", f"{info.attention_path}, error {info.attention_error:.2g}"))
        if info.fused:
            lines.append(("", _kernels(info.fused)))
        lines += [("", text) for text in _declined(info.paths)]
    lines.append(("KV cache", _settings(value.kv, info)))
    if info:
        size = f"; a page of 64 tokens: {format_bytes(info.page_bytes)}" if info.page_bytes else ""
        lines.append(("", info.kv_layout + size))
    lines.append(("memory", _memory(value.stats.memory, value.granted_bytes)))
    lines += [*_gpus(value), *_ranks(value.ranks)]
    lines.append(("rows", _rows(value)))
    lines.append(("pages", _pages(value)))
    if value.kv.prefix_cache != 0 and info:
        lines.append(("prompts", _prompts(value.stats.prefix)))
    head = Text.assemble((value.name, "bold"), "  ", status_page.state(value))
    if value.worker_pid:
        head.append(f"  pid {value.worker_pid}")
    parts: list[RenderableType] = [head, _pairs(lines)]
    if info and info.kv:
        parts += [Text(), _parts(info.kv)]
        for part in info.kv:
            if part.reason:
                parts.append(
                    Text.assemble((part.kind, "bold"), f": {part.reason}", overflow="fold")
                )
    if value.error:
        parts += [Text(), status_page.error(value)]
    return Group(*parts)


def _declined(paths: list[FastPath]) -> list[str]:
    """Return the fast paths that the load did not choose; `_kernels` has those of the kernels."""
    others = (path for path in paths if not path.used and path.name != "fused attention")
    return [f"no {path.name}: {path.reason}" for path in others]


def _embeddings(info: EmbeddingInfo | None) -> list[str]:
    if info is None:
        return []
    pooled = {"last_token": "the last token", "mean": "the mean", "cls": "the first token"}
    return [f"{info.dimensions} dimensions, pooled by {pooled[info.pooling]}"]


def _kernels(fused: FusedAttention) -> str:
    text = "kernels" if fused.used else f"without kernels: {fused.reason}"
    if fused.layers:
        text += f" ({fused.layers} fused layers)"
    if fused.call_ms is not None and fused.reference_ms is not None:
        text += f", {fused.call_ms:.2g} ms per layer instead of {fused.reference_ms:.2g} ms"
    return text


def _abilities(chat: ChatAbilities | None) -> list[str]:
    """Return what a model can do in a conversation, in one or two lines."""
    if chat is None:
        return ["no chat template: prompts only"]
    noted = ", tools in the system message" if chat.tools_noted else ""
    results = "" if chat.tool_results else ", results as notes of the user"
    first = f"tool calls as {chat.tools}{noted}{results}" if chat.tools else "no tool calls"
    if not chat.late_system:
        first += "; late system messages as notes of the user"
    if not chat.reasoning and not chat.efforts:
        return [first]
    second = f"reasoning after {chat.reasoning}" if chat.reasoning else "reasoning"
    if chat.reasoning_switch:
        off = ", can be switched off"
        second += off if chat.reasons_by_default else ", off unless a request turns it on"
    if chat.efforts:
        second += f", efforts {', '.join(chat.efforts)}"
    return [first, second]


def _pairs(lines: list[tuple[str, str]]) -> Table:
    table = named_values()
    for name, text in lines:
        table.add_row(name, Text(text))
    return table


def _settings(kv: KVSpec, info: ModelInfo | None) -> str:
    top, *lower = (info.kv_schemes if info else []) or [kv.name, *(step.name for step in kv.steps)]
    parts = [f"{top}, may step down to {', '.join(lower)}" if lower else f"{top}, never steps down"]
    if info:
        mixes = info.kv_mixes.items()
        for scheme, mix in mixes:
            even = len({*mix}) == 1
            parts.append(f"{scheme} as {mix[0] if even else f'{layer_schemes(mix)} by layer'}")
    if info and info.kv_bits:
        source, reason = info.kv_bits.source, info.kv_bits.reason
        bits = "equal bits in all layers" if source == "uniform" else f"bits by layer from {source}"
        parts.append(f"{bits} ({reason})")
    if info and info.kv_calibrated:
        parts.append(f"quality floor {info.kv_calibrated}")
    floors = sorted(kv.floors.items(), key=lambda floor: (floor[0] < 0, floor[0]))
    parts += [f"layer {layer} not below {kv.scheme_of(name).name}" for layer, name in floors]
    if kv.quantized_kv_start:
        parts.append(f"dense until {kv.quantized_kv_start} tokens")
    if kv.max_kv_size is not None:
        first = f", including the first {kv.keep}" if kv.keep else ""
        parts.append(f"at most {kv.max_kv_size} tokens{first}")
    if kv.prefix_cache is None:
        parts.append("prefix cache up to a quarter of the budget")
    elif kv.prefix_cache:
        parts.append(f"prefix cache up to {format_bytes(kv.prefix_cache)}")
    return "; ".join(parts)


def _memory(use: MemoryUse, granted: int) -> str:
    kinds = (
        ("weights", use.weights),
        ("pages", use.kv_pages),
        ("tails", use.kv_tails),
        ("scratch", use.scratch),
    )
    text = ", ".join(f"{name} {format_bytes(count)}" for name, count in kinds if count)
    total = f"{format_bytes(use.footprint)} of {format_bytes(granted)} granted"
    return f"{total}: {text}" if text else total


def _gpus(value: ModelStatus) -> list[tuple[str, str]]:
    if value.device is None:
        return []
    last = value.device + max(1, len(value.ranks)) - 1
    return [("GPU", str(last) if last == value.device else f"{value.device} to {last}")]


def _ranks(ranks: list[RankStatus]) -> list[tuple[str, str]]:
    """Return a line for each of the processes that share a model."""
    return [
        (f"rank {rank}", f"pid {one.pid}, {one.state}, {format_bytes(one.footprint_bytes)}")
        for rank, one in enumerate(ranks)
    ]


def _rows(value: ModelStatus) -> str:
    stats, queued = value.stats, status_page.queued(value)
    parts = [
        f"{stats.rows_running} decoding" if stats.rows_running else "",
        f"{stats.rows_prefilling} prefilling" if stats.rows_prefilling else "",
        f"{queued} queued" if queued else "",
        f"{value.paused} paused" if value.paused else "",
    ]
    text = ", ".join(part for part in parts if part) or "none"
    if stats.max_rows_in_step:
        text += f"; at most {stats.max_rows_in_step} in a step so far"
    if stats.reclaimable.level:
        text += f"; new ones start at {status_page.schemes(value)[stats.reclaimable.level]}"
    return text


def _pages(value: ModelStatus) -> str:
    stats = value.stats
    used = f"{stats.pages_used} of {stats.pages_total} used"
    return f"{used}, {status_page.levels(value).plain}" if sum(stats.memory.kv_levels) else used


def _prompts(use: PrefixUse) -> str:
    """Return the hits of the prefix cache and of the store, in tokens, and the cache's size."""
    rate = status_page.hit_rate(use)
    disk = f" and {use.disk_tokens} on disk" if use.disk_tokens else ""
    found = f"{use.hit_tokens} of {use.query_tokens} tokens found in the cache{disk}"
    plural = "" if use.checkpoints == 1 else "s"
    held = f"{use.checkpoints} checkpoint{plural} in {format_bytes(use.held)}"
    evicted = f", {use.evicted} evicted" if use.evicted else ""
    return f"{found}{f' ({rate})' if rate else ''}; {held}{evicted}"


def _parts(parts: list[KVPart]) -> Table:
    columns = [
        *map(text_column, ("LAYERS", "CACHE", "SCHEME")),
        *map(fixed_column, ("ROWS", "BYTES")),
    ]
    table = headed(*columns)
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
