"""`kvctl key`: creates and lists API keys of the HTTP interface; needs no daemon.

It prints lines for config.toml and does not write them, because the file belongs to the user.
"""

from __future__ import annotations

import re

import rich_click as click
from rich.text import Text

from kvd.cli.common import CommonOptions, Group, common_options
from kvd.cli.console import print_message, stdout_console
from kvd.config import config
from kvd.host.home import locate
from kvd.http import keys
from protocol.errors import InvalidRequest


@click.group(cls=Group, no_args_is_help=True)
def key() -> None:
    """Manage API keys of the HTTP interface."""


@key.command()
@click.argument("name", help="The key's owner: letters, digits, - and _.")
@common_options("home", "json")
def new(common: CommonOptions, name: str) -> None:
    """Create a key. It is printed only once; the configuration gets its hash."""
    with common.guarded():
        home = locate(common.home)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):  # valid as a bare key in TOML
            raise InvalidRequest("a name has 1 to 64 letters, digits, - and _", field="name")
        if name in config.load(home.config).http.keys:
            raise InvalidRequest(f"{name} has a key already; choose another name", field="name")
        created = keys.make()
        digest = keys.hashed(created)
        if common.json:
            common.print_json({"name": name, "key": created, "hash": digest})
            return
        click.echo(created)
        print_message(
            "This is the only time that the key is shown. Add its hash to {}", home.config
        )
        print_message("and run `kvctl service reload`, or restart the daemon:")
        print_message("\n{}\n{}", "[http]", f'keys.{name} = "{digest}"')


@key.command("list")
@common_options("home", "json")
def list_keys(common: CommonOptions) -> None:
    """List the names of the keys in the configuration."""
    with common.guarded():
        names = sorted(config.load(locate(common.home).config).http.keys)
        if common.json:
            common.print_json(names)
        elif names:
            for name in names:
                stdout_console().print(Text(name))
        else:
            print_message("no keys: HTTP serves only this machine, without authentication")
