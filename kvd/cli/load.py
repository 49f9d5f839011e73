"""`kvctl load` and `unload`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvd.cli import events, status_page
from kvd.cli.common import (
    HomeOption,
    JsonOption,
    ModelArgument,
    SocketOption,
    Terms,
    said,
    stderr_console,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.completion import a_source
from kvd.cli.options import takes_kv
from kvd.client import Client, Load
from kvd.config.sources import absolute
from kvd.host.units import format_bytes
from protocol.messages import Loading
from protocol.types import KVSpec, ModelStatus


@takes_kv
def load(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="NAME|PATH|HUB_ID", help="What to load.", autocompletion=a_source),
    ],
    *,
    alias: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name that requests use.")
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", metavar="", help="Never unload it to make room.")
    ] = False,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="Models of lower priority make room first.")
    ] = None,
    idle_ttl: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Unload it when idle for so long.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="The most of prompt and completion.")
    ] = None,
    kv: KVSpec | None,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Load a model: an embedded NAME (demo), the PATH of a folder, or a HUB_ID."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        policy = events.policy(pin=pin, priority=priority, ttl=idle_ttl, context=max_context)
        loading = client.load(absolute(model), alias=alias, kv=kv, policy=policy)
        loaded = _follow(loading, wanted, alias or model.rstrip("/").rpartition("/")[2])
        if wanted.json:
            wanted.print_json(loaded)
        else:
            console = stdout_console()
            console.print(status_page.model(loaded, console.width))


def _follow(loading: Load, wanted: Terms, name: str) -> ModelStatus:
    """Show the progress to a person; wait for the end."""
    console = stderr_console()
    if wanted.json or not console.is_terminal:
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
        talk("[dim]the daemon goes on loading it; `kvctl unload {}` ends that[/]", name)
        raise
    return loading.result


def unload(
    context: typer.Context,
    model: ModelArgument,
    *,
    force: Annotated[
        bool,
        typer.Option("--force", metavar="", help="End its requests instead of finishing them."),
    ] = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Finish a model's requests, then give its memory back."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        with _waiting(client, model, force=force):
            done = client.unload(model, force=force)
        if wanted.json:
            wanted.print_json({"model": done.model, "freed_bytes": done.freed_bytes})
        else:
            talk("{} unloaded, {} freed", done.model, format_bytes(done.freed_bytes))


def _waiting(
    client: Client, model: str, *, force: bool
) -> contextlib.AbstractContextManager[object]:
    """Tell a person what an unload waits for."""
    console = stderr_console()
    if force or not console.is_terminal:
        return contextlib.nullcontext()
    there = next((one.requests for one in client.status().models if one.name == model), 0)
    if not there:
        return contextlib.nullcontext()
    requests = f"{there} request" + ("" if there == 1 else "s")
    return console.status(
        said("{} of {} to finish; --force ends them", requests, model), spinner="dots"
    )
