"""`kvctl load`, `unload`, `pin` and `unpin`."""

from __future__ import annotations

import contextlib

import msgspec
import rich_click as click
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvd.cli import status_page
from kvd.cli.common import (
    CommonOptions,
    common_options,
    model_name,
    model_source,
    option,
    standard_panels,
)
from kvd.cli.console import format_message, print_message, stderr_console, stdout_console
from kvd.cli.options import Tokens, kv_options
from kvd.client import Client, Load
from kvd.config.sources import absolute
from kvd.host.units import format_bytes
from protocol.kv import KVSpec
from protocol.messages import Loading
from protocol.policy import PolicyChange
from protocol.types import ModelStatus
from protocol.validation import describe_error


@click.command(panels=standard_panels())
@model_source("What to load.")
@option("--alias", "NAME", "The name that requests use.")
@click.option("--pin", is_flag=True, help="Never unload it to make room.")
@option("--priority", "N", "Models of lower priority give memory back first.", type=int)
@option("--idle-ttl", "SECONDS", "Unload it after this time without requests.", type=float)
@option("--max-context", "TOKENS", "Maximum tokens of prompt and completion.", type=Tokens())
@option("--ranks", "N", "Processes that share the model (tensor parallelism).", type=int)
@option("--device", "N", "GPU of the model, or of its first rank.", type=int)
@kv_options()
@common_options()
def load(
    common: CommonOptions,
    model: str,
    *,
    alias: str | None,
    pin: bool,
    priority: int | None,
    idle_ttl: float | None,
    max_context: int | None,
    ranks: int | None,
    device: int | None,
    kv: KVSpec | None,
) -> None:
    """Load a model: an embedded NAME (demo), the PATH of a folder, or a HUB_ID."""
    with common.connected() as client:
        policy = _policy(
            pinned=pin or None,
            priority=priority,
            idle_ttl_s=idle_ttl,
            max_context=max_context,
            ranks=ranks,
            device=device,
        )
        loading = client.load(absolute(model), alias=alias, kv=kv, policy=policy)
        loaded = follow(loading, common, alias or model.rstrip("/").rpartition("/")[2])
        common.print_data(loaded, status_page.model(loaded, stdout_console().width))


def _policy(**given: float | None) -> PolicyChange:
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        return msgspec.convert(fields, PolicyChange)
    except msgspec.ValidationError as error:
        raise click.BadParameter(describe_error(str(error), PolicyChange)[1]) from None


def follow(loading: Load, common: CommonOptions, name: str) -> ModelStatus:
    """Return the loaded model; shows the progress on a terminal."""
    console = stderr_console()
    if common.json or not console.is_terminal:
        return loading.result
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("starting", total=1.0)
            for event in loading:
                if isinstance(event, Loading):
                    progress.update(task, description=event.stage, completed=event.fraction)
    except KeyboardInterrupt:
        print_message("[dim]the daemon continues loading; `kvctl unload {}` stops it[/]", name)
        raise
    return loading.result


@click.command(aliases=["stop"])
@model_name()
@click.option("--force", is_flag=True, help="Cancel its requests instead of finishing them.")
@common_options()
def unload(common: CommonOptions, model: str, *, force: bool) -> None:
    """Finish a model's requests, then free its memory."""
    with common.connected() as client:
        with _waiting(client, model, force=force):
            unloaded = client.unload(model, force=force)
        values = {"model": unloaded.model, "freed_bytes": unloaded.freed_bytes}
        freed = format_bytes(unloaded.freed_bytes)
        common.print_outcome(values, "{} unloaded, {} freed", unloaded.model, freed)


def _waiting(
    client: Client, model: str, *, force: bool
) -> contextlib.AbstractContextManager[object]:
    console = stderr_console()
    if force or not console.is_terminal:
        return contextlib.nullcontext()
    running = next((one.requests for one in client.status().models if one.name == model), 0)
    if not running:
        return contextlib.nullcontext()
    requests = f"{running} request" + ("" if running == 1 else "s")
    return console.status(
        format_message("waiting for {} of {}; --force cancels them", requests, model),
        spinner="dots",
    )


@click.command()
@model_name()
@common_options()
def pin(common: CommonOptions, model: str) -> None:
    """Never unload a model to make room."""
    _set_pinned(common, model, pinned=True)


@click.command()
@model_name()
@common_options()
def unpin(common: CommonOptions, model: str) -> None:
    """Allow a model to be unloaded to make room."""
    _set_pinned(common, model, pinned=False)


def _set_pinned(common: CommonOptions, model: str, *, pinned: bool) -> None:
    with common.connected() as client:
        reply = client.pin(model, pinned=pinned)
        state = "pinned" if reply.pinned else "not pinned"
        values = {"model": reply.model, "pinned": reply.pinned}
        common.print_outcome(values, "{} is {}", reply.model, state)
