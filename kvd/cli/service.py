"""`kvctl service`: the daemon as a service of launchd or systemd."""

from __future__ import annotations

import contextlib
import subprocess
import time
from contextlib import AbstractContextManager

import rich_click as click
from rich.text import Text

from kvd.cli.common import CommonOptions, Group, common_options, last_lines
from kvd.cli.console import print_message, stderr_console, stdout_console, write
from kvd.cli.logs import print_line
from kvd.cli.tables import named_values
from kvd.client import Client
from kvd.config import config
from kvd.host.exits import Exit
from kvd.host.home import locate
from kvd.host.listen import holder
from kvd.service import installer
from kvd.service.describe import State, describe
from kvd.service.installer import Manager
from protocol.errors import AlreadyRunning, ConfigError, KvdError, NotRunning, ServiceError
from protocol.types import DaemonStatus

_START_TIMEOUT_S = 20.0
"""Seconds to poll until the daemon answers; launchd does not report when a service is ready."""
_COLORS = {"running": "green", "listening": "green", "failed": "bold red", "stopped": "dim"}


@click.group(cls=Group, no_args_is_help=True)
def service() -> None:
    """Run the daemon of this home as a service of launchd (macOS) or systemd (Linux)."""


@service.command()
@click.option(
    "--on-demand", is_flag=True, help="Start with the first client instead of the session."
)
@click.option("--print", "print_only", is_flag=True, help="Print the files; change nothing.")
@click.option(
    "--force", is_flag=True, help="Replace files of the same name that kvd did not write."
)
@common_options("home", "json")
def install(common: CommonOptions, *, on_demand: bool, print_only: bool, force: bool) -> None:
    """Install and start the service, or update its files and restart it."""
    with common.guarded():
        home = locate(common.home)
        described = describe(home, config.load(home.config), on_demand=on_demand)
        manager = installer.manager_of(described)
        if print_only:
            _print_files(manager)
            return
        installer.refuse_foreign(manager, force=force)
        home.create()
        _refuse_other_daemon(manager)
        try:
            files = installer.install(manager, force=force)
        except ServiceError as error:
            raise ServiceError(f"{error.message}; run `kvctl doctor` for the reason") from error
        _wait_until_ready(manager, common)
        if common.json:
            common.print_json({"files": [str(path) for path in files], "on_demand": on_demand})
            return
        for path in files:
            print_message("[dim]wrote[/] {}", path)
        start = "the first client starts it" if on_demand else "running; starts with your session"
        print_message("installed for {}: {}", manager.name, start)
        if hint := manager.hint():
            print_message("[dim]hint:[/] {}", hint)


@service.command()
@common_options("home", "json")
def uninstall(common: CommonOptions) -> None:
    """Finish running requests, stop and remove the service; models, logs and config stay."""
    with common.guarded():
        removed = installer.uninstall(_manager(common, lenient=True))
        if common.json:
            common.print_json({"files": [str(path) for path in removed]})
        elif removed:
            for path in removed:
                print_message("[dim]deleted[/] {}", path)
        else:
            print_message("the service was not installed")


@service.command()
@common_options("home", "json")
def start(common: CommonOptions) -> None:
    """Start the service, and wait until the daemon answers."""
    with common.guarded():
        manager = _installed(common)
        _refuse_other_daemon(manager)
        manager.start()
        _wait_until_ready(manager, common)
        _print_state(common, manager)


@service.command()
@common_options("home", "json")
def stop(common: CommonOptions) -> None:
    """Finish running requests, at most for drain_timeout_s, and stop until the next session."""
    with common.guarded():
        manager = _installed(common, lenient=True)
        with _progress(common, "finishing running requests"):
            manager.stop()
        _print_state(common, manager)


@service.command()
@common_options("home", "json")
def restart(common: CommonOptions) -> None:
    """Finish running requests, then stop and start the service."""
    with common.guarded():
        manager = _installed(common)
        with _progress(common, "finishing running requests, then starting again"):
            manager.restart()
        _wait_until_ready(manager, common)
        _print_state(common, manager)


@service.command()
@common_options("home", "json")
def reload(common: CommonOptions) -> None:
    """Read config.toml again; lists the settings that need a restart."""
    with common.guarded():
        manager = _installed(common)  # raises for an invalid file
        before = _daemon_status(common)
        if before is None or manager.state().status != "running":
            raise ServiceError("the service does not run; its next start reads config.toml")
        manager.reload()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (now := _daemon_status(common)) and now.config_reloads == before.config_reloads:
            if time.monotonic() > deadline:
                raise ServiceError("the daemon has not read config.toml; see `kvctl service logs`")
            time.sleep(0.02)
        _print_state(common, manager)


@service.command()
@common_options("home", "json")
def status(common: CommonOptions) -> None:
    """Show how the service is installed and whether it runs. Exit code: 0 if it runs, else 3."""
    with common.guarded():
        manager = _manager(common, lenient=True)
        files = installer.installed(manager)
        state = manager.state() if files else State("stopped", "not installed")
        # Not if the service only listens: a request would start the daemon.
        daemon = None if state.status == "listening" else _daemon_status(common)
        if common.json:
            common.print_json(_as_json(manager, state, daemon))
        else:
            _show(manager, state, daemon)
        if state.status not in {"running", "listening"}:
            code = Exit.FAILED if state.status == "failed" else Exit.NOT_RUNNING
            raise SystemExit(code)


@service.command()
@last_lines(minimum=1)
@click.option("--follow", "-f", is_flag=True, help="Continue with new lines.")
@common_options("home", "json")
def logs(common: CommonOptions, *, lines: int, follow: bool) -> None:
    """Show the daemon's log, and errors from before it could write one."""
    with common.guarded():
        manager = _installed(common, lenient=True)
        _print_log(manager.logs(lines, follow=follow), raw=common.json)


def _print_log(command: list[str], *, raw: bool) -> None:
    """Print another program's output until either program ends."""
    try:
        process = subprocess.Popen(  # noqa: S603 - the manager's own program
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    except FileNotFoundError:
        raise ServiceError(f"{command[0]} is not installed on this machine") from None
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                # A line without a brace comes from the manager, not from the daemon.
                print_line(line, raw=raw or not line.startswith("{"))
        finally:
            process.terminate()


def _manager(common: CommonOptions, *, lenient: bool = False) -> Manager:
    """Return the manager of the service as installed, or as `install` would make it.

    With ``lenient`` an invalid configuration is ignored: it must not prevent a stop.
    """
    home = locate(common.home)
    try:
        settings = config.load(home.config)
    except ConfigError:
        if not lenient:
            raise
        settings = config.Config()
    manager = installer.manager_of(describe(home, settings))
    if not manager.is_on_demand():
        return manager
    try:
        return installer.manager_of(describe(home, settings, on_demand=True))
    except ConfigError:
        if not lenient:
            raise
        return installer.manager_of(describe(home, config.Config(), on_demand=True))


def _installed(common: CommonOptions, *, lenient: bool = False) -> Manager:
    manager = _manager(common, lenient=lenient)
    if not installer.installed(manager):
        raise ServiceError("the service is not installed; run `kvctl service install`")
    return manager


def _refuse_other_daemon(manager: Manager) -> None:
    """Raise if a daemon that is not the service's holds the home."""
    pid = holder(locate(manager.service.home))
    if pid is not None and pid != manager.state().pid:
        raise AlreadyRunning(
            f"a daemon that the service did not start (pid {pid}) serves {manager.service.home}; "
            "end it first: `kvctl shutdown`",
            pid=pid,
        )


def _progress(common: CommonOptions, text: str) -> AbstractContextManager[object]:
    return contextlib.nullcontext() if common.json else stderr_console().status(text)


def _wait_until_ready(manager: Manager, common: CommonOptions) -> None:
    """Wait until the daemon answers; raise with the reason if it does not."""
    if manager.service.on_demand:  # the first client starts it
        return
    deadline = time.monotonic() + _START_TIMEOUT_S
    while _daemon_status(common) is None:
        state = manager.state()
        if time.monotonic() > deadline or state.status == "failed":
            raise ServiceError(
                f"the daemon does not start ({state.status}; {state.details}); "
                "see `kvctl service logs`, and `kvctl doctor` for advice"
            )
        time.sleep(0.1)


def _daemon_status(common: CommonOptions) -> DaemonStatus | None:
    try:
        with Client(home=common.home) as client:
            return client.status()
    except (NotRunning, KvdError):
        return None


def _print_state(common: CommonOptions, manager: Manager) -> None:
    state = manager.state()
    daemon = None if state.status == "listening" else _daemon_status(common)
    if common.json:
        common.print_json(_as_json(manager, state, daemon))
        return
    print_message("{}{}", state.status, f" (pid {state.pid})" if state.pid else "")
    _print_config_state(daemon)


def _print_config_state(daemon: DaemonStatus | None) -> None:
    if daemon is None:
        return
    if daemon.config_error is not None:
        print_message("[bold red]config.toml was refused:[/] {}", daemon.config_error)
    if daemon.config_pending:
        print_message("[yellow]needs a restart:[/] {}", ", ".join(daemon.config_pending))


def _as_json(manager: Manager, state: State, daemon: DaemonStatus | None) -> dict[str, object]:
    return {
        "manager": manager.name,
        "state": state.status,
        "about": state.details,
        "pid": state.pid,
        "files": [str(path) for path in installer.installed(manager)],
        "outdated": [str(path) for path in installer.outdated(manager)],
        "on_demand": manager.service.on_demand,
        "home": str(manager.service.home),
        "answers": daemon is not None,
        "config_error": daemon.config_error if daemon else None,
        "config_pending": daemon.config_pending if daemon else [],
    }


def _show(manager: Manager, state: State, daemon: DaemonStatus | None) -> None:
    table = named_values()
    line = Text.assemble((state.status, _COLORS.get(state.status, "yellow")))
    if state.pid:
        line.append(f"  pid {state.pid}")
    if state.details:
        line.append(f"  {state.details}", "dim")
    table.add_row("state", line)
    table.add_row("home", Text(str(manager.service.home)))
    start = "with the first client" if manager.service.on_demand else "with the session"
    for path in installer.installed(manager):
        table.add_row("file", Text(str(path)))
    if installer.installed(manager):
        table.add_row("starts", start)
    console = stdout_console()
    console.print(table)
    if installer.outdated(manager):
        print_message(
            "[yellow]the installed service files are outdated: this version and configuration "
            "would write different contents;[/] `kvctl service install` updates them"
        )
    if daemon is not None and state.status != "running":
        print_message("[yellow]the service did not start the running daemon, pid {}[/]", daemon.pid)
    if not installer.installed(manager):
        foreign = installer.foreign(manager)
        for path in foreign:
            print_message("[yellow]{}[/]", installer.describe_foreign(path))
        if not foreign:
            print_message("`kvctl service install` installs it")
    _print_config_state(daemon)


def _print_files(manager: Manager) -> None:
    for path, content in manager.files().items():
        print_message("[dim]# {}[/]", path)
        write(content.decode())
