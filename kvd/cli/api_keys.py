"""`kvctl key`: creates and lists API keys of the HTTP interface; needs no daemon."""

from __future__ import annotations

import re
from pathlib import Path

import rich_click as click
from rich.text import Text

from kvd.cli.common import CommonOptions, Group, common_options
from kvd.cli.config import change_live, save_option, save_value
from kvd.cli.console import print_message, stdout_console
from kvd.config import config
from kvd.host.home import Home, locate
from kvd.http import keys
from protocol.errors import InvalidRequest


@click.group(cls=Group, no_args_is_help=True)
def key() -> None:
    """Manage API keys of the HTTP interface."""


@key.command()
@click.argument("name", help="The key's owner: letters, digits, - and _.")
@save_option
@common_options("home", "json")
def new(common: CommonOptions, name: str, *, save: bool) -> None:
    """Create a key. It is printed only once; --save writes its hash to config.toml."""
    with common.guarded():
        home = locate(common.home)
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):  # valid as a bare key in TOML
            raise InvalidRequest("a name has 1 to 64 letters, digits, - and _", field="name")
        if name in config.load(home.config).http.keys:
            raise InvalidRequest(f"{name} has a key already; choose another name", field="name")
        created = keys.make()
        digest = keys.hashed(created)
        setting = f"http.keys.{name}"
        path = save_value(common, setting, digest, new=True) if save else None
        if common.json:
            saved = {"saved": str(path)} if path is not None else {}
            common.print_json({"name": name, "key": created, "hash": digest, **saved})
        else:
            click.echo(created)
            print_message("This is the only time that the key is shown.")
            _print_hash(home, f'keys.{name} = "{digest}"', path)
        if path is not None and change_live(common, setting, digest, saved=True):
            print_message("the daemon accepts it now; from now on, HTTP over TCP requires a key")


def _print_hash(home: Home, line: str, saved: Path | None) -> None:
    if saved is not None:
        print_message("saved its hash in {}", saved)
        return
    print_message("Add its hash to the table {} of {}, as --save does,", "[http]", home.config)
    print_message("and run `kvctl reload`, or start the daemon:\n\n{}", line)


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
