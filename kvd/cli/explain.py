"""`kvctl explain`: what rows of a model take, whether they fit, and what would make room."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvd.cli.common import HomeOption, JsonOption, SocketOption, stdout_console, terms
from kvd.cli.completion import a_model
from kvd.cli.options import takes_kv
from kvd.config.sources import absolute
from kvd.host.units import format_bytes
from protocol.forecast import Forecast, LevelCost, ReclaimStep
from protocol.messages import MAX_FORECAST_ROWS
from protocol.types import KVSpec

_GAP = 2
_DONE = {
    "spare": "take back what {} has and does not need",
    "prefixes": "drop prompts that {} remembers",
    "expired": "unload {}, which has been idle for too long",
    "precision": "step rows of {} down to level {level}",
    "idle": "unload {}, which is idle",
    "preempt": "park rows of {}",
}
"""What a rung of the ladder does, in words."""
_STYLES = {"fits": "green", "makes_room": "yellow", "waits": "yellow", "never": "bold red"}


@takes_kv
def explain(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name that is loaded or known; or a model to load.",
            autocompletion=a_model,
        ),
    ],
    *,
    ctx: Annotated[
        int | None,
        typer.Option(
            "--ctx",
            metavar="TOKENS",
            min=1,
            help="Prompt and completion of a row (default: the model's whole context).",
        ),
    ] = None,
    rows: Annotated[
        int, typer.Option(metavar="N", min=0, max=MAX_FORECAST_ROWS, help="Requests at once.")
    ] = 1,
    kv: KVSpec | None,
    home: HomeOption = None,
    socket: SocketOption = None,
    json: JsonOption = False,
) -> None:
    """Tell what rows of a model would take of the budget, and what would make room for them."""
    wanted = terms(context, home, socket, json=json)
    with wanted.connected() as client:
        value = client.explain(absolute(model), rows=rows, context=ctx, kv=kv)
        if wanted.json:
            wanted.print_json(value)
        else:
            stdout_console().print(page(value))


def page(value: Forecast) -> RenderableType:
    """Return all of it, for people."""
    parts: list[RenderableType] = [_head(value), Text(), _model(value), Text(), _levels(value)]
    parts += [Text(), _verdict(value)]
    if value.steps:
        parts.append(_steps(value.steps))
    if value.verdict == "waits":
        parts.append(
            Text(
                f"{format_bytes(value.shortfall_bytes)} are still lacking after that: requests would"
                " wait until others end."
            )
        )
    return Group(*parts)


def _head(value: Forecast) -> Text:
    told = "as its worker counts" if value.measured else "reckoned from its files"
    return Text.assemble((value.model, "bold"), f"  {value.state}, {told}")


def _model(value: Forecast) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    lines = [
        ("weights", value.weights_bytes, ""),
        ("base", value.base_bytes, "with interpreter and scratch, as long as it is loaded"),
        ("idle", value.idle_bytes, "with its first pages"),
        ("budget", value.budget_bytes, ""),
        ("free", value.available_bytes, "granted to nobody"),
    ]
    if value.held_bytes:
        lines.append(("granted", value.held_bytes, "to this model now"))
    for name, nbytes, meaning in lines:
        table.add_row(name, format_bytes(nbytes), meaning)
    return table


def _levels(value: Forecast) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("LEVEL", no_wrap=True)
    for name in ("A TOKEN", "A ROW", _rows(value).upper(), "MOST ROWS"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, level in enumerate(value.levels):
        style = "" if level.total_bytes <= value.budget_bytes else "red"
        table.add_row(*_cells(number, level), style=style)
    return table


def _cells(number: int, level: LevelCost) -> tuple[str, ...]:
    return (
        f"{number}  {level.scheme}",
        format_bytes(round(level.token_bytes)),
        format_bytes(level.row_bytes),
        format_bytes(level.total_bytes),
        f"{level.max_rows:,}",
    )


def _rows(value: Forecast) -> str:
    return f"{value.rows:,} row" + ("" if value.rows == 1 else "s")


def _verdict(value: Forecast) -> Text:
    level = value.levels[value.level]
    what = f"{_rows(value)} of {value.context:,} tokens at {level.scheme}"
    total, more = format_bytes(level.total_bytes), format_bytes(value.missing_bytes)
    lacks = f"{what} would take {total} in all, {more} more than is free."
    lowest = value.levels[-1]
    text = {
        "fits": f"{what}: there is room now ({total} in all).",
        "makes_room": f"{lacks} It would be had so:",
        "waits": lacks + (" To begin with:" if value.steps else ""),
        "never": f"{_rows(value)} of {value.context:,} tokens never fit: even at {lowest.scheme}"
        f" they would take {format_bytes(lowest.total_bytes)} of a budget of"
        f" {format_bytes(value.budget_bytes)}, which holds {lowest.max_rows:,} at most.",
    }[value.verdict]
    return Text(text, style=_STYLES[value.verdict])


def _steps(steps: list[ReclaimStep]) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0))
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for number, step in enumerate(steps, 1):
        what = _DONE[step.method].format(step.model, level=step.level)
        table.add_row(f"{number}.", what, format_bytes(step.nbytes))
    return table
