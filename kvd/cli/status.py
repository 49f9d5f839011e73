"""`kvctl status`: the daemon, its memory and its models, once or repeatedly."""

from __future__ import annotations

import contextlib
import time

import rich_click as click
from rich.console import Group, RenderableType

from kvd.cli.common import CommonOptions, common_options, find_model, model_name, option
from kvd.cli.console import format_message, print_message, stdout_console
from kvd.cli.polling import PollingClient
from kvd.cli.ranges import Seconds
from protocol.errors import NotRunning
from protocol.types import DaemonStatus


@click.command()
@model_name("Show details of this model.", required=False)
@click.option("--watch", "-w", is_flag=True, help="Repeat until Ctrl-C.")
@option(
    "--interval",
    "SECONDS",
    "Time between updates, with --watch.",
    type=Seconds(0.1),
    default=2.0,
)
@common_options()
def status(common: CommonOptions, model: str | None, *, watch: bool, interval: float) -> None:
    """Show the daemon, its memory and its models, or details of one MODEL."""
    with common.guarded(), PollingClient(common) as client:
        if watch:
            _watch(client, common, model, interval)
            return
        value = client.status()
        if common.json:
            _print_json(common, value, model)
        else:
            console = stdout_console()
            console.print(_page(value, model, console.width))


def _print_json(common: CommonOptions, value: DaemonStatus, model: str | None) -> None:
    common.print_json(value if model is None else find_model(value, model))


def _page(value: DaemonStatus, model: str | None, width: int) -> RenderableType:
    if model is None:
        from kvd.cli import status_page  # noqa: PLC0415 - --json does not need it

        return status_page.status(value, width)
    from kvd.cli import model_page  # noqa: PLC0415

    return model_page.page(find_model(value, model))


def _watch(
    client: PollingClient, common: CommonOptions, model: str | None, interval: float
) -> None:
    """Show the status until Ctrl-C; while no daemon runs, wait for one."""
    console = stdout_console()
    with contextlib.ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
        live = None
        if console.is_terminal and not common.json:
            from rich.live import Live  # noqa: PLC0415 - only --watch needs it

            live = Live(console=console, auto_refresh=False)
            stack.callback(live.stop)  # registered first: a signal may arrive during start
            live.start()
        shown: RenderableType = ""
        away = False
        while True:
            try:
                value = client.status()
            except NotRunning as error:
                message = ("[yellow]{}[/]; waiting for it", error.message)
                if live is not None:
                    live.update(Group(shown, "", format_message(*message)), refresh=True)
                elif not away:
                    print_message(*message)
                away = True
            else:
                away = False
                if common.json:
                    _print_json(common, value, model)
                else:
                    shown = _page(value, model, console.width)
                    console.print(shown, "") if live is None else live.update(shown, refresh=True)
            time.sleep(interval)
