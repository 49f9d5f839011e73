"""`kvctl config`: every setting with where it comes from; changes, live and in `config.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from kvd.cli.common import (
    HomeOption,
    JsonOption,
    SocketOption,
    Terms,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.completion import a_setting
from kvd.cli.usage import Command, Group
from kvd.host.home import locate
from kvd.host.units import format_bytes, parse_bytes
from protocol.errors import ConfigError, NotRunning
from protocol.settings import Changed, Setting

if TYPE_CHECKING:
    from protocol.messages import Configured

app = typer.Typer(
    name="config", help="Show the settings, or change them.", invoke_without_command=True
)
_GAP = 2
_ORIGINS = {"default": "dim", "file": "", "live": "yellow", "command_line": "cyan"}
_HOLDS = {
    "now": "",
    "unload": "; holds when the model has been unloaded",
    "start": "; needs a restart of the daemon",
    "command_line": "; has no effect: the command line of `kvd serve` says otherwise",
}
KeyArgument = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="Such as budget or watchdog.decode_s.", autocompletion=a_setting
    ),
]
SaveOption = Annotated[
    bool,
    typer.Option(
        "--save", "-s", metavar="", help="Write it to config.toml too, which keeps its comments."
    ),
]


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.callback(cls=Group)
def config(
    context: typer.Context,
    *,
    budget: Annotated[
        int | None,
        typer.Option(parser=_bytes, metavar="SIZE", help="A new budget, until the daemon ends."),
    ] = None,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show the settings and where they come from, or change them."""
    wanted = terms(context, home, socket, json=json)
    context.obj = wanted
    if context.invoked_subcommand is not None:
        return
    if budget is None:
        _show(wanted, None)
        return
    with wanted.connected() as client:
        now = client.configure(budget_bytes=budget)
        if wanted.json:
            wanted.print_json(_sums(now))
        else:
            stdout_console().print(_budget(now))


@app.command("get", cls=Command)
def get(
    context: typer.Context,
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Print only its value.", autocompletion=a_setting),
    ] = None,
    *,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Show every setting, its value and where that comes from; or print the value of one KEY."""
    _show(terms(context, home, socket, json=json), key)


@app.command("set", cls=Command)
def change(
    context: typer.Context,
    key: KeyArgument,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="As in config.toml.")],
    *,
    save: SaveOption = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Change a setting: live where that can be, until the daemon ends; with --save for good."""
    _change(terms(context, home, socket, json=json), key, _value(value), save=save)


@app.command("unset", cls=Command)
def unset(
    context: typer.Context,
    key: KeyArgument,
    *,
    save: SaveOption = False,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Go back to what config.toml says; with --save take it out there: the default holds then."""
    _change(terms(context, home, socket, json=json), key, None, save=save)


# -- showing --------------------------------------------------------------------------------------


def _show(wanted: Terms, key: str | None) -> None:
    with wanted.guarded():
        now, found = _settings(wanted)
        if key is not None:
            found = [_one(found, key)]
        if wanted.json:
            rows = [msgspec.to_builtins(one) for one in found]
            whole = {**(_sums(now) if now else {}), "settings": rows}
            wanted.print_json(rows[0] if key is not None else whole)
        elif key is not None:
            stdout_console().print(Text(shown(found[0].value)), soft_wrap=True)
        else:
            console = stdout_console()
            if now is not None:
                console.print(_budget(now))
                console.print()
            else:
                talk("[dim]no daemon runs; this is what the next one starts with[/]")
            console.print(page(found))


def _settings(wanted: Terms) -> tuple[Configured | None, list[Setting]]:
    """Return what the daemon says; without one, what the file does."""
    from kvd.client import Client  # noqa: PLC0415 - `connected` would complain

    try:
        with Client(home=wanted.home, socket=wanted.socket) as client:
            now = client.configure(table=True)
            return now, now.settings
    except NotRunning:
        if wanted.socket is not None:
            raise
    from kvd.config import config as files  # noqa: PLC0415 - without a daemon only
    from kvd.config.settings import table  # noqa: PLC0415

    path = locate(wanted.home).config
    return None, table(files.load(path), path)


def _one(found: list[Setting], key: str) -> Setting:
    for one in found:
        if one.key == key:
            return one
    near = [one.key for one in found if key.rpartition(".")[2] in one.key]
    hint = (
        f"; did you mean {' or '.join(near[:3])}?" if near else "; `kvctl config get` has them all"
    )
    raise ConfigError(f"there is no setting {key!r}{hint}", key=key)


def page(found: list[Setting]) -> Table:
    """Return all settings as a table."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("KEY", style="bold", no_wrap=True)
    table.add_column("VALUE", overflow="fold")
    table.add_column("FROM", no_wrap=True)
    table.add_column("CHANGES", overflow="fold", style="dim")
    for one in found:
        value = Text(shown(one.value), "" if one.origin != "default" else "dim")
        origin = Text(one.origin.replace("_", " "), _ORIGINS[one.origin])
        table.add_row(Text(one.key), value, origin, _changes(one))
    return table


def _changes(one: Setting) -> Text:
    """Return when a change of it holds."""
    if one.pending:
        return Text(f"waits for a restart: {shown(one.next)}", "yellow")
    if one.live:
        return Text("live")
    return Text("while it is not loaded" if one.key.startswith("models[") else "at a restart")


def shown(value: Any) -> str:
    """Return a value as `config.toml` has it; nothing said is a dash."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return msgspec.json.encode(value).decode()


def _budget(now: Configured) -> str:
    total, granted = format_bytes(now.budget_bytes), format_bytes(now.granted_bytes)
    return f"budget {total}, {granted} granted"


def _sums(now: Configured) -> dict[str, int]:
    return {"budget_bytes": now.budget_bytes, "granted_bytes": now.granted_bytes}


# -- changing -------------------------------------------------------------------------------------


def _value(text: str) -> Any:
    """Return what a text stands for: as in TOML, where quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _change(wanted: Terms, key: str, value: Any, *, save: bool) -> None:
    with wanted.guarded():
        path = locate(wanted.home).config if save else None
        if save and wanted.socket is not None:
            raise typer.BadParameter("--save needs --home: a socket has no config.toml")
        edited = None
        if path is not None:
            from kvd.cli.config_file import edited_text  # noqa: PLC0415 - only here

            edited = edited_text(path, key, value)  # refused before anything is changed
        if path is not None and edited is not None:
            _write(path, edited)
        changes = _live(wanted, key, value, saved=save)
        if wanted.json:
            saved = {"saved": str(path)} if path is not None else {}
            wanted.print_json({"changes": changes or [], **saved})
        else:
            _say(key, changes, path)


def _live(wanted: Terms, key: str, value: Any, *, saved: bool) -> list[Changed] | None:
    """Change it in the daemon; None: there is none."""
    from kvd.client import Client  # noqa: PLC0415 - `connected` would complain

    try:
        with Client(home=wanted.home, socket=wanted.socket) as client:
            return client.configure(settings={key: value}).changes
    except NotRunning:
        if not saved:
            raise
        return None


def _say(key: str, changes: list[Changed] | None, path: Path | None) -> None:
    for one in changes or ():
        restart = (
            "" if path is not None or one.takes_effect != "start" else ", and --save to be kept"
        )
        style = "" if one.takes_effect == "now" else "[yellow]"
        told = f"[bold]{{}}[/]  {{}} → {{}}{style}{_HOLDS[one.takes_effect]}{restart}"
        talk(told, one.key, shown(one.before), shown(one.after))
    if changes == [] and path is None:
        talk("{} is that already", key)
    if path is not None:
        talk("saved in {}", path)


def _write(path: Path, text: str) -> None:
    """Put the text in the file's place, all of it or nothing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = path.resolve()  # a link stays one
    aside = target.with_suffix(".new")
    aside.write_text(text, encoding="utf-8")
    aside.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o600)
    aside.replace(target)
