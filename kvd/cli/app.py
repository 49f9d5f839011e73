"""The commands of `kvctl`; completions are in `kvd.cli.generate`, talk in `kvd.cli.chat`."""

from __future__ import annotations

import fcntl
import time
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvd.cli import chat as chats
from kvd.cli import detail, forecast, governing, render
from kvd.cli import sampling as how
from kvd.cli.bench_kv import bench_kv
from kvd.cli.calibrate import calibrate
from kvd.cli.common import (
    HomeOption,
    JsonOption,
    SocketOption,
    Terms,
    model_in,
    stderr_console,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.generate import attach, generate
from kvd.cli.options import LEVELS, VersionOption, takes_kv
from kvd.cli.usage import Command, Group
from kvd.client import Load
from kvd.exits import Exit
from kvd.sources import absolute
from kvd.units import format_bytes
from protocol.messages import Loading
from protocol.types import KVSpec, ModelStatus

app = typer.Typer(
    name="kvctl",
    help="Talk to the kvd daemon.",
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 no daemon, 5 config, 6 refused, 7 retry.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name.")]
_GONE_S = 10.0
"""How long `shutdown` waits for the process to end after its goodbye."""


@app.callback(cls=Group)
def _program(
    context: typer.Context,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
    version: VersionOption = False,  # noqa: ARG001 - the callback has done it
) -> None:
    context.obj = Terms(home, socket, json)


@app.command(cls=Command)
def status(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Show all about this one.")
    ] = None,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the daemon, its memory and its models; or all about one MODEL."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        value = client.status()
        one = None if model is None else model_in(value, model)
        if wanted.json:
            wanted.print_json(one or value)
        else:
            console = stdout_console()
            console.print(detail.page(one) if one else render.status(value, console.width))


@app.command(cls=Command)
@takes_kv
def load(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="NAME|PATH|HUB_ID", help="What to load.")],
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
        policy = governing.policy(pin=pin, priority=priority, ttl=idle_ttl, context=max_context)
        loading = client.load(absolute(model), alias=alias, kv=kv, policy=policy)
        loaded = _follow(loading, wanted)
        if wanted.json:
            wanted.print_json(loaded)
        else:
            stdout_console().print(render.model(loaded), soft_wrap=True)


def _follow(loading: Load, wanted: Terms) -> ModelStatus:
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
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        for event in loading:
            if isinstance(event, Loading):
                progress.update(task, description=event.stage, completed=event.fraction)
    return loading.result


@app.command(cls=Command)
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
        done = client.unload(model, force=force)
        if wanted.json:
            wanted.print_json({"model": done.model, "freed_bytes": done.freed_bytes})
        else:
            talk(f"{done.model} unloaded, {format_bytes(done.freed_bytes)} freed")


app.command(cls=Command)(generate)
app.command(cls=Command)(attach)
app.command(cls=Command)(governing.events)
app.command(cls=Command)(forecast.explain)
app.command(cls=Command)(governing.pin)
app.command(cls=Command)(governing.unpin)
app.command(cls=Command)(governing.config)


@app.command(cls=Command)
def chat(
    context: typer.Context,
    model: ModelArgument,
    *,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    max_tokens: how.MaxTokens = None,
    temperature: how.Temperature = 0.7,
    top_p: how.TopP = 1.0,
    top_k: how.TopK = 0,
    min_p: how.MinP = 0.0,
    seed: how.Seed = None,
    repetition_penalty: how.RepetitionPenalty = 1.0,
    presence_penalty: how.PresencePenalty = 0.0,
    frequency_penalty: how.FrequencyPenalty = 0.0,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Converse with a model; /help lists the commands."""
    wanted = terms(context, home, socket, json=json)
    settings = chats.Settings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    with wanted.connected() as client:
        chats.Chat(client, model, settings, wanted, system=system).run()


@app.command(cls=Command)
def drain(
    context: typer.Context,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Take no new work and wait until nothing runs; the daemon stays up."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        client.drain()
        if wanted.json:
            wanted.print_json({"state": "drained"})
        else:
            talk("drained; `kvctl shutdown` ends the daemon")


@app.command(cls=Command)
def shutdown(
    context: typer.Context,
    *,
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="End what runs instead of finishing it.")
    ] = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Drain, then end the daemon; returns when its home is free."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        client.shutdown(force=force)
        gone = _wait_until_gone(wanted)
        if wanted.json:
            wanted.print_json({"state": "stopped" if gone else "stopping"})
        elif gone:
            talk("stopped")
        else:
            talk(f"still lives {_GONE_S:g} s after its goodbye; try again, or end its process")
        if not gone:
            raise typer.Exit(Exit.RETRY)


def _wait_until_gone(wanted: Terms) -> bool:
    """Wait until the daemon's lock is free, so that the next one can start at once.

    Return whether it is.
    """
    deadline = time.monotonic() + _GONE_S
    try:
        with wanted.lock.open("rb") as lock:
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.02)
                else:
                    return True
    except FileNotFoundError:
        return True  # a socket outside of a home
    return False


app.command("bench-kv", cls=Command)(bench_kv)
app.command(cls=Command)(takes_kv(calibrate, only=LEVELS))


def main() -> None:
    """Run the command line."""
    app()
