"""`kvctl events`, `pin` and `unpin`: what the governor did, and what it is told."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from kvd.cli.common import (
    HomeOption,
    JsonOption,
    ModelArgument,
    SocketOption,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.completion import a_model
from kvd.host.units import format_bytes
from protocol.messages import EventRecord
from protocol.policy import ModelPolicy
from protocol.validation import explain

_LOUD = {
    "evict": "yellow",
    "requeue": "yellow",
    "reclaim_precision": "yellow",
    "reclaim_preempt": "yellow",
    "load_refused": "red",
    "excess": "red",
    "violation": "bold red",
}
"""Kinds that cost somebody something."""


def policy(
    *, pin: bool, priority: int | None, ttl: float | None, context: int | None
) -> ModelPolicy | None:
    """Return what a load says of the model; None: nothing."""
    said = {"pinned": pin, "priority": priority or 0, "idle_ttl_s": ttl, "max_context": context}
    try:
        found = msgspec.convert(said, ModelPolicy)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(explain(str(error), ModelPolicy)[1]) from None
    return None if found == ModelPolicy() and priority is None else found


def events(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Only what concerns this one.", autocompletion=a_model
        ),
    ] = None,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", metavar="", help="Go on with what happens from now.")
    ] = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show what was done to make room, and why."""
    wanted = terms(context, home, socket, json=json)
    console, happened = stdout_console(), None
    with wanted.connected() as client:
        for happened in client.events(model, follow=follow):
            if wanted.json:
                wanted.print_json(happened)
            else:
                console.print(line(happened), soft_wrap=True)
    if happened is None:
        talk("nothing had to be done so far")


def line(it: EventRecord) -> Text:
    """Return an event as people read it."""
    when = time.strftime("%H:%M:%S", time.localtime(it.at))
    text = Text.assemble((when, "dim"), " ", (it.kind, _LOUD.get(it.kind, "bold")))
    if it.model:
        text.append(f" {it.model}")
    if it.reason:
        text.append(f": {it.reason}")
    numbers = ", ".join(_number(name, value) for name, value in it.numbers.items())
    return text.append(f"  ({numbers})", "dim") if numbers else text


def _number(name: str, value: int) -> str:
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} {format_bytes(value)}"
    return f"{name} {value}"


def pin(
    context: typer.Context,
    model: ModelArgument,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Never unload a model to make room."""
    _pin(context, model, home, socket, json=json, pinned=True)


def unpin(
    context: typer.Context,
    model: ModelArgument,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Let a model be unloaded to make room again."""
    _pin(context, model, home, socket, json=json, pinned=False)


def _pin(
    context: typer.Context,
    model: str,
    home: str | None,
    socket: str | None,
    *,
    json: bool,
    pinned: bool,
) -> None:
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        done = client.pin(model, pinned=pinned)
        if wanted.json:
            wanted.print_json({"model": done.model, "pinned": done.pinned})
        else:
            talk("{} is {}", done.model, "pinned" if done.pinned else "not pinned any more")
