"""`kvctl calibrate`: which level of the ladder a model bears, measured here and stored in the home.

Needs no daemon: the measuring runs in a process of its own (`kvd.worker.tools.calibrate`). This file
starts it and shows what it says.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import typer
from rich.table import Table

from kvd.cli.common import (
    HomeOption,
    JsonOption,
    Terms,
    stdout_console,
    talk,
    terms,
)
from kvd.cli.options import LEVELS, takes_kv
from kvd.cli.tool import run_tool
from kvd.config.sources import absolute
from kvd.host.home import locate
from protocol.types import KVSpec

_GAP = 2


@functools.partial(takes_kv, only=LEVELS)
def calibrate(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="NAME|PATH|HUB_ID", help="What to measure.")],
    *,
    kv: KVSpec | None,
    max_kl: Annotated[
        float, typer.Option("--max-kl", metavar="NATS", help="KL divergence at most, mean.")
    ] = 0.02,
    min_top1: Annotated[
        float, typer.Option("--min-top1", metavar="SHARE", help="Same top token at least so often.")
    ] = 0.95,
    prompts: Annotated[int, typer.Option(metavar="N", help="Texts to measure on.")] = 4,
    tokens: Annotated[int, typer.Option(metavar="N", help="Length of each text.")] = 1024,
    home: HomeOption = None,
    json: JsonOption = False,
) -> None:
    """Find and store the lowest KV level that keeps a floor; loads of the model then obey it.

    Needs no daemon, and its memory is not of a running daemon's budget.
    """
    wanted = terms(context, home, None, json=json)
    with wanted.guarded():
        place = locate(wanted.home)
        place.create()
        if not wanted.json:
            talk("[dim]this loads the model once more, outside of a running daemon's budget[/]")
        spec = kv or KVSpec()
        schemes = [spec.name, *(step.name for step in spec.steps)]
        arguments = {
            "home": place.root, "schemes": ",".join(schemes), "max-kl": max_kl,
            "min-top1": min_top1, "prompts": prompts, "tokens": tokens,
        }  # fmt: skip
        given = [f"--{name}={value}" for name, value in arguments.items()]
        result = run_tool(
            "kvd.worker.tools.calibrate", [*given, absolute(model)], quiet=wanted.json
        )
        show(result, wanted)


def show(result: dict[str, Any], wanted: Terms) -> None:
    """Print the verdict, as JSON or as a table and a sentence."""
    if wanted.json:
        wanted.print_json(result)
        return
    stdout_console().print(table(result))
    talk(verdict(result))
    talk("[dim]stored: {}; models that are loaded already keep theirs[/]", result["file"])


def table(result: dict[str, Any]) -> Table:
    """Return a line for each level."""
    found = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    for name in ("LEVEL", "KL", "TOP-1", "PERPLEXITY", "FLOOR"):
        found.add_column(name, justify="left" if name in {"LEVEL", "FLOOR"} else "right")
    for one in result["levels"]:
        found.add_row(
            one["scheme"],
            _number(one["kl"], ".2g"),
            _number(one["top1"], ".2%"),
            _number(one["perplexity_change"], "+.2%"),
            "kept" if one["allowed"] else "missed",
        )
    return found


def verdict(result: dict[str, Any]) -> str:
    """Return what it means, in a sentence."""
    floor = f"KL up to {result['max_kl']:g}, top-1 from {result['min_top1']:.4g}"
    lowest = result["lowest"]
    if lowest not in {one["scheme"] for one in result["levels"]}:
        top = result["levels"][0]["scheme"]
        return f"not even {top} keeps the floor ({floor}): the model gets {lowest}, not quantized"
    return f"pages of this model go down to [bold]{lowest}[/], not below ({floor})"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
