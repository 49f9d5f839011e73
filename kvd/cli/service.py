"""`kvctl service`: kvd started by launchd or systemd, with the session or by its first client."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from kvd.cli.common import (
    HomeOption,
    JsonOption,
    Terms,
    stderr_console,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.logs import line as readable
from kvd.cli.usage import Command, Group
from kvd.client import Client
from kvd.config import config
from kvd.host.exits import Exit
from kvd.host.home import locate
from kvd.host.listen import holder
from kvd.service import managing
from kvd.service.describe import describe
from kvd.service.state import State
from protocol.errors import AlreadyRunning, ConfigError, KvdError, NotRunning, ServiceError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from kvd.service.managing import Manager
    from protocol.types import DaemonStatus

app = typer.Typer(
    name="service",
    help="Have launchd (macOS) or systemd (Linux) run the daemon of this home.",
    no_args_is_help=True,
    cls=Group,
)
_COMES_UP_S = 20.0
"""How long `start` waits for the daemon to answer; launchd does not say when it does."""
_COLOURS = {
    "running": "green",
    "listening": "green",
    "failed": "bold red",
    "stopped": "dim",
}


@app.command(cls=Command)
def install(
    context: typer.Context,
    *,
    on_demand: Annotated[
        bool,
        typer.Option(
            "--on-demand", metavar="", help="Start with the first client, not with the session."
        ),
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", metavar="", help="Print the files; change nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", metavar="", help="Replace files of that name that are not kvd's."),
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Install and start it; again: bring its files up to date, and restart it."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        place = locate(wanted.home)
        described = describe(place, config.load(place.config), on_demand=on_demand)
        manager = managing.manager_of(described)
        if print_only:
            _print_files(manager)
            return
        managing.refuse_foreign(manager, force=force)
        place.create()
        _refuse_a_stranger(manager)
        try:
            files = managing.install(manager, force=force)
        except ServiceError as error:
            raise ServiceError(f"{error.message}; `kvctl doctor` may know why") from error
        _wait_until_up(manager, wanted)
        if wanted.json:
            wanted.print_json({"files": [str(path) for path in files], "on_demand": on_demand})
            return
        for path in files:
            talk("[dim]wrote[/] {}", path)
        way = "the first client starts it" if on_demand else "it runs, and starts with your session"
        talk("{} has it: {}", manager.name, way)
        if hint := manager.hint():
            talk("[dim]hint:[/] {}", hint)


@app.command(cls=Command)
def uninstall(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """Finish what runs, stop it and delete its files; models, logs and config stay."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        gone = managing.uninstall(_manager(wanted, lenient=True))
        if wanted.json:
            wanted.print_json({"files": [str(path) for path in gone]})
        elif gone:
            for path in gone:
                talk("[dim]deleted[/] {}", path)
        else:
            talk("it was not installed")


@app.command(cls=Command)
def start(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """Start it, and wait until it answers."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        manager = _installed(wanted)
        _refuse_a_stranger(manager)
        manager.start()
        _wait_until_up(manager, wanted)
        _say(wanted, manager)


@app.command(cls=Command)
def stop(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """Finish what runs, at most for drain_timeout_s, and stop it until the next session."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        manager = _installed(wanted, lenient=True)
        with _patience(wanted, "finishes what runs"):
            manager.stop()
        _say(wanted, manager)


@app.command(cls=Command)
def restart(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """Finish what runs, stop it and start it again."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        manager = _installed(wanted)
        with _patience(wanted, "finishes what runs, and starts again"):
            manager.restart()
        _wait_until_up(manager, wanted)
        _say(wanted, manager)


@app.command(cls=Command)
def reload(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """Have it read config.toml again; says what waits for a restart."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        manager = _installed(wanted)  # a wrong file is refused here already
        before = _daemon(wanted)
        if before is None or manager.state().status != "running":
            raise ServiceError("it does not run; the next start reads config.toml anyway")
        manager.reload()
        deadline = time.monotonic() + _COMES_UP_S
        while (now := _daemon(wanted)) and now.config_reloads == before.config_reloads:
            if time.monotonic() > deadline:
                raise ServiceError("it has not read config.toml; `kvctl service logs` may say why")
            time.sleep(0.02)
        _say(wanted, manager)


@app.command(cls=Command)
def status(context: typer.Context, *, home: HomeOption = None, json: JsonOption = False) -> None:
    """Show how it is installed and whether it runs. Exit code 0: it does, 3: it does not."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        manager = _manager(wanted, lenient=True)
        files = managing.installed(manager)
        state = manager.state() if files else State("stopped", "not installed")
        # A client would start one that only listens.
        daemon = None if state.status == "listening" else _daemon(wanted)
        if wanted.json:
            wanted.print_json(_as_json(manager, state, daemon))
        else:
            _show(manager, state, daemon)
        if state.status not in {"running", "listening"}:
            raise typer.Exit(Exit.FAILED if state.status == "failed" else Exit.NOT_RUNNING)


@app.command(cls=Command)
def logs(
    context: typer.Context,
    *,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=1)] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", metavar="", help="Go on with what comes.")
    ] = False,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Show what the daemon said, and what went wrong before it could say it."""
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        manager = _installed(wanted, lenient=True)
        _pass_on(manager.logs(lines, follow=follow), raw=wanted.json)


def _pass_on(command: list[str], *, raw: bool) -> None:
    """Print what a program prints, until it ends or we do."""
    console = stdout_console()
    try:
        shown = subprocess.Popen(  # noqa: S603 - the manager's own program
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except FileNotFoundError:
        raise ServiceError(f"{command[0]} is not on this machine") from None
    with shown:
        assert shown.stdout is not None
        try:
            for line in shown.stdout:
                if raw or not line.startswith("{"):  # the manager's own words stay as they are
                    sys.stdout.write(line)
                    sys.stdout.flush()
                else:
                    console.print(readable(line), soft_wrap=True)
        finally:
            shown.terminate()


# -- what they share ------------------------------------------------------------------------------


def _manager(wanted: Terms, *, lenient: bool = False) -> Manager:
    """Return the manager for the service as it is installed, or as it would be.

    `lenient`: also with a configuration that is wrong, which must not hinder a stop.
    """
    place = locate(wanted.home)
    try:
        settings = config.load(place.config)
    except ConfigError:
        if not lenient:
            raise
        settings = config.Config()
    manager = managing.manager_of(describe(place, settings))
    if not manager.is_on_demand():
        return manager
    try:
        return managing.manager_of(describe(place, settings, on_demand=True))
    except ConfigError:
        if not lenient:
            raise
        return managing.manager_of(describe(place, config.Config(), on_demand=True))


def _installed(wanted: Terms, *, lenient: bool = False) -> Manager:
    manager = _manager(wanted, lenient=lenient)
    if not managing.installed(manager):
        raise ServiceError("the service is not installed; `kvctl service install` does it")
    return manager


def _refuse_a_stranger(manager: Manager) -> None:
    """Raise if a daemon that is not the service's has the home: two would not get along."""
    pid = holder(locate(manager.service.home))
    if pid is not None and pid != manager.state().pid:
        raise AlreadyRunning(
            f"a daemon (pid {pid}) that is not the service's serves {manager.service.home}; end it "
            "first: `kvctl shutdown`",
            pid=pid,
        )


def _patience(wanted: Terms, what: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if wanted.json else stderr_console().status(what)


def _wait_until_up(manager: Manager, wanted: Terms) -> None:
    """Wait until the daemon answers, if it is to run now; raise with the reason if it does not."""
    if manager.service.on_demand:
        return
    deadline = time.monotonic() + _COMES_UP_S
    while _daemon(wanted) is None:
        state = manager.state()
        if time.monotonic() > deadline or state.status == "failed":
            raise ServiceError(
                f"it does not come up ({state.status}; {state.details}); "
                "`kvctl service logs` says why, `kvctl doctor` what to do"
            )
        time.sleep(0.1)


def _daemon(wanted: Terms) -> DaemonStatus | None:
    try:
        with Client(home=wanted.home) as client:
            return client.status()
    except (NotRunning, KvdError):
        return None


def _say(wanted: Terms, manager: Manager) -> None:
    state = manager.state()
    daemon = None if state.status == "listening" else _daemon(wanted)
    if wanted.json:
        wanted.print_json(_as_json(manager, state, daemon))
        return
    talk("{}{}", state.status, f" (pid {state.pid})" if state.pid else "")
    _tell_news(daemon)


def _tell_news(daemon: DaemonStatus | None) -> None:
    """Say what is to be said of the configuration."""
    if daemon is None:
        return
    if daemon.config_error is not None:
        talk("[bold red]config.toml was refused:[/] {}", daemon.config_error)
    if daemon.config_pending:
        talk("[yellow]waits for a restart:[/] {}", ", ".join(daemon.config_pending))


def _as_json(manager: Manager, state: State, daemon: DaemonStatus | None) -> dict[str, object]:
    return {
        "manager": manager.name,
        "state": state.status,
        "about": state.details,
        "pid": state.pid,
        "files": [str(path) for path in managing.installed(manager)],
        "outdated": [str(path) for path in managing.outdated(manager)],
        "on_demand": manager.service.on_demand,
        "home": str(manager.service.home),
        "answers": daemon is not None,
        "config_error": daemon.config_error if daemon else None,
        "config_pending": daemon.config_pending if daemon else [],
    }


def _show(manager: Manager, state: State, daemon: DaemonStatus | None) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    line = Text.assemble((state.status, _COLOURS.get(state.status, "yellow")))
    if state.pid:
        line.append(f"  pid {state.pid}")
    if state.details:
        line.append(f"  {state.details}", "dim")
    table.add_row("state", line)
    table.add_row("home", Text(str(manager.service.home)))
    way = "by the first client" if manager.service.on_demand else "with the session"
    for path in managing.installed(manager):
        table.add_row("file", Text(str(path)))
    if managing.installed(manager):
        table.add_row("starts", way)
    console = stdout_console()
    console.print(table)
    if managing.outdated(manager):
        talk(
            "[yellow]its files are not what this version and configuration would write:[/] "
            "`kvctl service install` brings them up to date"
        )
    if daemon is not None and state.status != "running":
        talk("[yellow]a daemon (pid {}) that is not the service's answers[/]", daemon.pid)
    if not managing.installed(manager):
        theirs = managing.foreign(manager)
        for one in theirs:
            talk("[yellow]{}[/]", managing.describe_foreign(one))
        if not theirs:
            talk("`kvctl service install` installs it")
    _tell_news(daemon)


def _print_files(manager: Manager) -> None:
    for path, content in manager.files().items():
        talk("[dim]# {}[/]", path)
        sys.stdout.write(content.decode())
        sys.stdout.flush()
