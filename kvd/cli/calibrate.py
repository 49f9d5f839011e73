"""`kvctl calibrate`: measures a model's quality floor and stores it in the home.

Needs no daemon: `kvd.worker.tools.calibrate` measures in a separate process. This module starts it
and shows the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import rich_click as click
from rich.table import Column, Table

from kvd.cli.common import CommonOptions, common_options, model_source, option, standard_panels
from kvd.cli.console import print_message, stdout_console
from kvd.cli.mixes import layer_schemes
from kvd.cli.options import LEVELS, Tokens, kv_options
from kvd.cli.ranges import Number
from kvd.cli.tables import headed
from kvd.cli.tool import run_tool
from kvd.config.sources import absolute
from kvd.host.home import locate
from protocol.kv import KVSpec


@click.command(panels=standard_panels())
@model_source("What to measure.")
@kv_options(*LEVELS)
@option("--max-kl", "NATS", "Highest mean KL divergence.", type=Number(0, 100), default=0.02)
@option(
    "--min-top1",
    "SHARE",
    "Lowest share of steps with the same top token.",
    type=Number(0, 1),
    default=0.95,
)
@option("--prompts", "N", "Texts to measure on.", type=click.IntRange(1, 10_000), default=4)
@option("--tokens", "N", "Length of each text.", type=Tokens(1), default=1024)
@option(
    "--text",
    "FILE",
    "Measure on the first 4 MiB of a text file. Default: kvd's own texts.",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
)
@common_options("home", "json")
def calibrate(
    common: CommonOptions,
    model: str,
    *,
    kv: KVSpec | None,
    max_kl: float,
    min_top1: float,
    prompts: int,
    tokens: int,
    text: Path | None,
) -> None:
    """Find and store a model's quality floor, which later loads of the model respect.

    Needs no daemon. Loads the model once more, outside a running daemon's budget.
    """
    with common.guarded():
        home = locate(common.home)
        home.create()
        if not common.json:
            print_message(
                "[dim]this loads the model once more, outside a running daemon's budget[/]"
            )
        spec = kv or KVSpec()
        schemes = ",".join([spec.name, *(step.name for step in spec.steps)])
        arguments = [
            f"--home={home.root}",
            f"--schemes={schemes}",
            f"--max-kl={max_kl}",
            f"--min-top1={min_top1}",
            f"--prompts={prompts}",
            f"--tokens={tokens}",
            *([f"--text={text.absolute()}"] if text else []),
            absolute(model),
        ]
        result = run_tool("calibrate", arguments, quiet=common.json)
        if common.json:
            common.print_json(result)
            return
        stdout_console().print(table(result))
        print_message(verdict(result))
        measured = "[dim]measured on {} texts of up to {} tokens from {}[/]"
        print_message(
            measured, result["prompts"], result["tokens"], result["text"] or "kvd's own tasks"
        )
        stored = "[dim]stored in {}; models already loaded keep their levels[/]"
        print_message(stored, result["file"])


def table(result: dict[str, Any]) -> Table:
    numbers = (Column(name, justify="right") for name in ("KL", "TOP-1", "PERPLEXITY"))
    levels = headed(Column("LEVEL"), *numbers, Column("QUALITY"), Column("BITS BY LAYER"))
    for level in result["levels"]:
        levels.add_row(
            level["scheme"],
            _number(level["kl"], ".2g"),
            _number(level["top1"], ".2%"),
            _number(level["perplexity_change"], "+.2%"),
            "allowed" if level["allowed"] else "too low",
            _bits(level),
        )
    return levels


def verdict(result: dict[str, Any]) -> str:
    limits = f"KL up to {result['max_kl']:g}, top-1 from {result['min_top1']:.4g}"
    lowest = result["lowest"]
    if lowest not in {level["scheme"] for level in result["levels"]}:
        top = result["levels"][0]["scheme"]
        return f"even {top} misses the limits ({limits}), so pages are not quantized ({lowest})"
    return f"rows may step down as far as [bold]{lowest}[/] ({limits})"


def _bits(level: dict[str, Any]) -> str:
    """Describe a level's mix, with what its scheme costs in all layers."""
    if not level["mix"]:
        return "the same in all"
    return f"{layer_schemes(level['mix'])} ({_number(level['uniform_kl'], '.2g')} without)"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)
