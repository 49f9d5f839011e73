"""`kvctl key`: the API keys of the HTTP interface. Works without the daemon.

Prints lines for the configuration and does not write it: that file is the user's.
"""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.text import Text

from kvd.cli.common import HomeOption, JsonOption, stdout_console, talk, terms
from kvd.cli.usage import Command, Group
from kvd.config import config
from kvd.host.home import locate
from kvd.http import keys
from protocol.errors import InvalidRequest

app = typer.Typer(
    name="key",
    help="API keys of the HTTP interface.",
    no_args_is_help=True,
    add_completion=False,
    cls=Group,
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="Whose it is: letters, digits, - and _.")
]


@app.command(cls=Command)
def new(
    context: typer.Context,
    name: NameArgument,
    *,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Make a key: printed once, here; the configuration gets its hash."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        place = locate(wanted.home)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):  # a bare key of TOML
            raise InvalidRequest("a name has letters, digits, - and _, at most 64", field="name")
        known = config.load(place.config).http.keys
        if name in known:
            raise InvalidRequest(f"{name} has a key already; choose another name", field="name")
        key = keys.make()
        line = f'keys.{name} = "{keys.hashed(key)}"'
        if wanted.json:
            wanted.print_json({"name": name, "key": key, "hash": keys.hashed(key)})
            return
        typer.echo(key)
        talk("The key is shown only now. Add its hash to the configuration, then")
        talk("`kvctl service reload` or restart the daemon; {}:", place.config)
        talk("\n{}\n{}", "[http]", line)


@app.command("list", cls=Command)
def show(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """List the names of the keys in the configuration."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        names = sorted(config.load(locate(wanted.home).config).http.keys)
        if wanted.json:
            wanted.print_json(names)
        elif names:
            for name in names:
                stdout_console().print(Text(name))
        else:
            talk("no keys: HTTP is for this machine alone, and asks for none")
