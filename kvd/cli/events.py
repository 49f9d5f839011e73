"""`kvctl events`: what the governor did."""

from __future__ import annotations

import time

import rich_click as click
from rich.text import Text

from kvd.cli.common import CommonOptions, common_options, model_name
from kvd.cli.console import print_message
from kvd.host.units import format_bytes
from protocol.messages import EventRecord

_STYLES = {
    "evict": "yellow",
    "requeue": "yellow",
    "reclaim_precision": "yellow",
    "reclaim_preempt": "yellow",
    "load_refused": "red",
    "excess": "red",
    "over_limit": "red",
    "violation": "bold red",
}
"""Styles of the kinds that have a cost for some model; the others are bold."""


@click.command()
@model_name("Only events of this model.", required=False)
@click.option("--follow", "-f", is_flag=True, help="Continue with new events.")
@common_options()
def events(common: CommonOptions, model: str | None, *, follow: bool) -> None:
    """Show what the daemon did to make room, and why."""
    event = None
    with common.connected() as client:
        for event in client.events(model, follow=follow):
            common.print_data(event, line(event), soft_wrap=True)
    if event is None:
        print_message("no events so far")


def line(event: EventRecord) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    text = Text.assemble((clock, "dim"), " ", (event.kind, _STYLES.get(event.kind, "bold")))
    if event.model:
        text.append(f" {event.model}")
    if event.reason:
        text.append(f": {event.reason}")
    numbers = ", ".join(_number(name, value) for name, value in event.numbers.items())
    return text.append(f"  ({numbers})", "dim") if numbers else text


def _number(name: str, value: int) -> str:
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes')} {format_bytes(value)}"
    return f"{name} {value}"
