"""`kvctl status`: the daemon, its memory and its models."""

from __future__ import annotations

from typing import Annotated

import typer

from kvd.cli import detail, render
from kvd.cli.common import (
    HomeOption,
    JsonOption,
    SocketOption,
    model_in,
    stdout_console,
    terms,
)


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
