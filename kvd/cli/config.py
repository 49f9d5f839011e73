"""`kvctl config`: every setting with its origin; changes in the daemon and in `config.toml`."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click
from rich.table import Table
from rich.text import Text

from kvd.cli.common import CommonOptions, Decorator, common_options, option
from kvd.cli.completion import setting_keys
from kvd.cli.console import print_message, stdout_console
from kvd.cli.options import parse_budget
from kvd.cli.tables import fixed_column, headed, text_column
from kvd.client import Client
from kvd.host.home import locate
from kvd.host.units import format_bytes
from protocol.errors import ConfigError, NotRunning
from protocol.messages import Configured
from protocol.settings import Changed, Setting

_ORIGINS = {"default": "dim", "file": "", "live": "yellow", "command_line": "cyan"}
_TAKES_EFFECT = {
    "now": "",
    "unload": "; takes effect after `kvctl unload` and `kvctl reload`",
    "start": "; needs a restart of the daemon",
    "command_line": "; has no effect: an option or variable of `kvd serve` overrides it",
}
_key_argument: Decorator = click.argument(
    "key", help="Such as budget or watchdog.decode_s.", shell_complete=setting_keys
)
save_option: Decorator = click.option(
    "--save", "-s", is_flag=True, help="Change config.toml as well; its comments stay."
)


@click.group(invoke_without_command=True)
@option("--budget", "SIZE", "A new budget, until the daemon ends.", callback=parse_budget)
@common_options()
@click.pass_context
def config(context: click.Context, common: CommonOptions, *, budget: int | None) -> None:
    """Show the settings, or change them."""
    context.obj = common
    if context.invoked_subcommand is not None:
        return
    if budget is None:
        _show(common, None)
        return
    with common.connected() as client:
        configured = client.configure(budget_bytes=budget)
        common.print_data(_sums(configured), _budget(configured))
        _print_problems(configured, "budget")


@config.command()
@click.argument("key", required=False, help="Print only its value.", shell_complete=setting_keys)
@common_options()
def get(common: CommonOptions, key: str | None) -> None:
    """Show every setting, its value and its origin, or print the value of one KEY."""
    _show(common, key)


@config.command("set")
@_key_argument
@click.argument("value", help="As in config.toml.")
@save_option
@common_options()
def set_value(common: CommonOptions, key: str, value: str, *, save: bool) -> None:
    """Change a setting in the running daemon until it ends; --save keeps the change."""
    _change(common, key, _parse_value(value), save=save)


@config.command()
@_key_argument
@save_option
@common_options()
def unset(common: CommonOptions, key: str, *, save: bool) -> None:
    """Undo a live change. With --save, remove the key from config.toml as well."""
    _change(common, key, None, save=save)


@click.command()
@common_options()
def reload(common: CommonOptions) -> None:
    """Make the daemon read config.toml again; lists what changes now and what needs a restart."""
    with common.connected() as client:
        configured = client.reload()
        if common.json:
            common.print_json(_changes_as_json(configured))
        else:
            _print_changes(configured.changes)
            nothing = "" if configured.changes else ": nothing changes"
            print_message("reloaded config.toml{}", nothing)
            _print_problems(configured)


def _show(common: CommonOptions, key: str | None) -> None:
    with common.guarded():
        configured, settings = _settings(common)
        if key is not None:
            setting = _find(settings, key)
            common.print_data(setting, Text(format_value(setting.value)), soft_wrap=True)
        elif common.json:
            rows = [msgspec.to_builtins(setting) for setting in settings]
            common.print_json({**(_sums(configured) if configured else {}), "settings": rows})
        else:
            console = stdout_console()
            if configured is not None:
                console.print(_budget(configured))
                console.print()
            else:
                print_message("[dim]no daemon runs; the next one starts with these settings[/]")
            console.print(page(settings))


def _settings(common: CommonOptions) -> tuple[Configured | None, list[Setting]]:
    """Return the daemon's settings; without a daemon, those of the file."""
    try:
        with Client(home=common.home, socket=common.socket) as client:
            configured = client.configure(table=True)
            return configured, configured.settings
    except NotRunning:
        if common.socket is not None:
            raise
    from kvd.config import config as files  # noqa: PLC0415 - without a daemon only
    from kvd.config.settings import table  # noqa: PLC0415

    path = locate(common.home).config
    return None, table(files.load(path), path)


def _find(settings: list[Setting], key: str) -> Setting:
    for setting in settings:
        if setting.key == key:
            return setting
    similar = [setting.key for setting in settings if key.rpartition(".")[2] in setting.key]
    hint = f"did you mean {' or '.join(similar[:3])}?" if similar else "see `kvctl config get`"
    raise ConfigError(f"there is no setting {key!r}; {hint}", key=key)


def page(settings: list[Setting]) -> Table:
    table = headed(
        fixed_column("KEY", style="bold"),
        text_column("VALUE"),
        fixed_column("FROM"),
        text_column("CAN CHANGE", style="dim"),
    )
    for setting in settings:
        value = Text(format_value(setting.value), "" if setting.origin != "default" else "dim")
        origin = Text(setting.origin.replace("_", " "), _ORIGINS[setting.origin])
        table.add_row(Text(setting.key), value, origin, _changes(setting))
    return table


def _changes(setting: Setting) -> Text:
    if setting.pending:
        return Text(f"at the next restart: {format_value(setting.next)}", "yellow")
    if setting.live:
        return Text("live")
    return Text(
        "while the model is not loaded" if setting.key.startswith("models[") else "at a restart"
    )


def format_value(value: Any) -> str:
    """Return a value as in `config.toml`, strings without quotes; a dash for no value."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return msgspec.json.encode(value).decode()


def _budget(configured: Configured) -> str:
    total, granted = format_bytes(configured.budget_bytes), format_bytes(configured.granted_bytes)
    return f"budget {total}, {granted} granted"


def _sums(configured: Configured) -> dict[str, int]:
    return {"budget_bytes": configured.budget_bytes, "granted_bytes": configured.granted_bytes}


def _parse_value(text: str) -> Any:
    """Return the TOML value of a text; quotes of strings may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _change(common: CommonOptions, key: str, value: Any, *, save: bool) -> None:
    with common.guarded():
        path = save_value(common, key, value) if save else None
        configured = change_live(common, key, value, saved=save)
        if common.json:
            saved = {"saved": str(path)} if path is not None else {}
            common.print_json({**_changes_as_json(configured), **saved})
            return
        changes = configured.changes if configured else []
        _print_changes(changes, ", and --save to keep it" if path is None else "")
        if path is not None:
            print_message("saved in {}", path)
        elif not changes:
            print_message("{} has this value already", key)
        _print_problems(configured, key)


def save_value(common: CommonOptions, key: str, value: Any, *, new: bool = False) -> Path:
    """Change a setting in `config.toml`, or remove it with None; return the file's path.

    ``new``: only if it is not set. Raises `ConfigError`, and then writes nothing.
    """
    if common.socket is not None:
        raise click.BadParameter("--save needs --home: a socket has no config.toml")
    from kvd.cli import config_file  # noqa: PLC0415 - only here

    path = locate(common.home).config
    config_file.save(path, key, value, new=new)
    return path


def change_live(common: CommonOptions, key: str, value: Any, *, saved: bool) -> Configured | None:
    """Change a setting in the daemon; None as the value restores the file's.

    Without a daemon, returns None if the file has the change (``saved``), and else raises
    `NotRunning`.
    """
    try:
        with Client(home=common.home, socket=common.socket) as client:
            return client.configure(settings={key: value})
    except NotRunning:
        if not saved:
            raise
        return None


def _changes_as_json(configured: Configured | None) -> dict[str, Any]:
    if configured is None:
        return {"changes": []}
    return {"changes": configured.changes, "problems": configured.problems}


def _print_problems(configured: Configured | None, key: str | None = None) -> None:
    """Print the problems that the daemon reports, or only those of one setting."""
    for problem in configured.problems if configured else ():
        if key in {None, problem.key}:
            print_message("[bold yellow]warning:[/] {}; {}", problem.observed, problem.advice)


def _print_changes(changes: list[Changed], pending: str = "") -> None:
    """Print changes; ``pending`` is added to those that are not in effect yet."""
    for change in changes:
        style = "" if change.takes_effect == "now" else "[yellow]"
        print_message(
            f"[bold]{{}}[/]  {{}} → {{}}{style}{_TAKES_EFFECT[change.takes_effect]}"
            f"{pending if change.pending else ''}",
            change.key,
            format_value(change.before),
            format_value(change.after),
        )
