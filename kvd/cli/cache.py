"""`kvctl cache`: the prefixes of prompts that are stored on disk."""

from __future__ import annotations

import time
from collections.abc import Iterator

import rich_click as click
from rich.console import Group, RenderableType
from rich.text import Text

from kvd.cli import completion
from kvd.cli.common import CommonOptions, common_options, option
from kvd.cli.options import Duration
from kvd.cli.tables import headed, number_column, text_column
from kvd.host.units import format_bytes, format_duration
from protocol.prefix_messages import CacheReply
from protocol.segments import PrefixStoreStatus


@click.group(invoke_without_command=True)
@common_options()
@click.pass_context
def cache(context: click.Context, common: CommonOptions) -> None:
    """Show which prefixes are stored on disk, or delete some."""
    context.obj = common
    if context.invoked_subcommand is None:
        with common.connected() as client:
            reply = client.cache()
            common.print_data(reply, page(reply, time.time()))


@cache.command()
@option(
    "--model",
    "NAME",
    "Only prefixes that this model used, loaded or not.",
    shell_complete=completion.model_names,
)
@option("--older-than", "AGE", "Only prefixes unused for this long, such as 7d.", type=Duration())
@click.option("--all", "everything", is_flag=True, help="All prefixes.")
@common_options()
def drop(
    common: CommonOptions, *, model: str | None, older_than: float | None, everything: bool
) -> None:
    """Delete stored prefixes; models of the same weights share them."""
    chosen = model is not None or older_than is not None
    if chosen == everything:
        raise click.UsageError("Give --model or --older-than or both, or --all.")
    with common.connected() as client:
        dropped = client.cache_drop(model=model, unused_s=older_than)
        values = {"segments": dropped.segments, "freed_bytes": dropped.freed_bytes}
        size = format_bytes(dropped.freed_bytes)
        common.print_outcome(values, "deleted {} segments of {}", dropped.segments, size)


def page(reply: CacheReply, now: float) -> RenderableType:
    parts: list[RenderableType] = [Text(line) for line in _facts(reply.store)]
    if reply.spaces:
        table = headed(
            text_column("MODELS", style="bold"),
            *map(number_column, ("SEGMENTS", "TOKENS", "SIZE", "HITS", "SAVED", "USED")),
        )
        for space in reply.spaces:
            table.add_row(
                ", ".join(space.models) or "?",
                str(space.segments),
                str(space.tokens),
                format_bytes(space.nbytes),
                str(space.hits),
                format_duration(max(0.0, space.saved_s)),
                f"{format_duration(max(0.0, now - space.used))} ago",
            )
        parts += [Text(), table]
    return Group(*parts)


def _facts(store: PrefixStoreStatus) -> Iterator[str]:
    if store.fault is not None:
        yield f"off: {store.fault}; the daemon tries again every minute"
    elif not store.limit_bytes:
        yield "off; turn it on with `kvctl config set prefix_store.limit 20GB --save`"
        return
    elif store.state == "opening":
        yield "the index is being read"
    stored, limit = format_bytes(store.stored_bytes), format_bytes(store.limit_bytes)
    today, daily = format_bytes(store.written_today_bytes), format_bytes(store.daily_bytes)
    encrypted = ", encrypted" if store.encrypted else ""
    yield f"stored   {stored} of {limit} in {store.segments} segments{encrypted}"
    yield f"written  {today} of {daily} today, {format_bytes(store.written_bytes)} in all"
    yield f"keeps    {format_bytes(store.keep_free_bytes)} of the disk free"
