"""`kvctl status`: the daemon, its memory and its models, once or again and again."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group

from kvd.cli.common import (
    HomeOption,
    JsonOption,
    SocketOption,
    Terms,
    model_in,
    said,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.completion import a_model
from kvd.cli.polling import Watch, is_away
from protocol.errors import KvdError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

    from protocol.types import DaemonStatus


def status(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Show all about this one.", autocompletion=a_model),
    ] = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", metavar="", help="Show it again and again.")
    ] = False,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Between two looks, with --watch.")
    ] = 2.0,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the daemon, its memory and its models; or all about one MODEL."""
    wanted = terms(context, home, socket, json=json)
    with wanted.guarded(), Watch(wanted) as looking:
        if watch:
            _again_and_again(looking, wanted, model, interval)
        else:
            value = looking.status()
            if wanted.json:
                wanted.print_json(value if model is None else model_in(value, model))
            else:
                console = stdout_console()
                console.print(_page(value, model, console.width))


def _page(value: DaemonStatus, model: str | None, width: int) -> RenderableType:
    if model is None:
        from kvd.cli import status_page  # noqa: PLC0415 - not for programs

        return status_page.status(value, width)
    from kvd.cli import model_page  # noqa: PLC0415

    return model_page.page(model_in(value, model))


def _again_and_again(looking: Watch, wanted: Terms, model: str | None, interval: float) -> None:
    """Show it until Ctrl-C, which is the way to end this; a daemon that goes away may come back."""
    console = stdout_console()
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        live = _live(console) if _in_place(console, wanted) else None
        if live is not None:
            stack.callback(live.stop)  # before it starts: a signal may come meanwhile
            live.start()
        before: RenderableType = ""
        away = False
        while True:
            try:
                value = looking.status()
            except KvdError as error:
                if not is_away(error):
                    raise
                told = ("[yellow]{}[/]; waiting for it", error.message)
                if live is not None:
                    live.update(Group(before, "", said(*told)), refresh=True)
                elif not away:
                    talk(*told)
                away = True
            else:
                away = False
                if wanted.json:
                    wanted.print_json(value if model is None else model_in(value, model))
                else:
                    before = _page(value, model, console.width)
                    console.print(before, "") if live is None else live.update(before, refresh=True)
            time.sleep(interval)


def _in_place(console: Console, wanted: Terms) -> bool:
    return console.is_terminal and not wanted.json


def _live(console: Console) -> Live:
    from rich.live import Live  # noqa: PLC0415 - only here

    return Live(console=console, auto_refresh=False)
