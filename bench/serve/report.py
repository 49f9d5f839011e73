"""Tables and plot of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.serve.bars import Verdict
from bench.serve.sides import PLAIN
from kvd.bench.measure import Results, median, ratio
from kvd.bench.report import COLUMNS, LOWER_IS_BETTER


def tables(results: Results, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a table for each trace, with the ratios to `PLAIN`, and then the bars."""
    for trace, sides in results.items():
        console.print(trace_table(trace, sides))
    console.print(bars_table(verdicts))


def trace_table(trace: str, sides: Any) -> Table:
    """Return a table of the medians over runs, one row for each side, and the ratios to `PLAIN`."""
    medians = {side: median(runs) for side, runs in sides.items() if runs}
    shown = [
        name
        for name in COLUMNS
        if any(not math.isnan(row.get(name, math.nan)) for row in medians.values())
    ]
    table = Table(title=f"{trace} (medians of {max(map(len, sides.values()), default=0)} runs)")
    table.add_column("server")
    for name in shown:
        table.add_column(COLUMNS[name][0], justify="right")
    for side, row in medians.items():
        table.add_row(side, *(_number(row[name], *COLUMNS[name][1:]) for name in shown))
    table.add_section()
    for side in medians:
        if side != PLAIN and sides.get(PLAIN):
            found = [ratio(sides[side], sides[PLAIN], name) for name in shown]
            table.add_row(f"{side} / {PLAIN}", *(_number(one, 1, 2) for one in found))
    return table


def bars_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table of the bars and the measured ratios."""
    table = Table(title="bars")
    for heading in ("bar", "trace", "ratio of", "to", "is", "must be", ""):
        table.add_column(heading)
    for one in verdicts:
        bar = one.bar
        word = {True: "[green]pass", False: "[red]miss", None: "not measured"}[one.passed]
        limit = f"{'≥' if bar.at_least else '≤'} {bar.limit:g}"
        table.add_row(
            bar.what, bar.trace, bar.ours, bar.theirs, _number(one.ratio, 1, 2), limit, word
        )
    return table


def _number(value: float, factor: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value * factor:,.{digits}f}"


def bars_as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return the bars with the measured ratios."""
    return [{**asdict(one.bar), "ratio": one.ratio, "passed": one.passed} for one in verdicts]


def plot(results: Results, file: Path) -> None:
    """Draw throughput, time to the first token and the 99th percentile of gaps, by trace."""
    from matplotlib.figure import Figure

    panels = {"tok_s": "tokens / s", "ttft_p50": "first token p50, ms", "itl_p99": "gap p99, ms"}
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels))
    sides = list(dict.fromkeys(side for one in results.values() for side in one))
    width = 0.8 / len(sides)
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        factor = COLUMNS[name][1]
        for at, side in enumerate(sides):
            heights = [
                median(one[side])[name] * factor if one.get(side) else 0 for one in results.values()
            ]
            places = [trace + (at - (len(sides) - 1) / 2) * width for trace in range(len(results))]
            axis.bar(places, heights, width, label=side)
        axis.set_xticks(range(len(results)), list(results), fontsize=8)
        axis.set_title(title, fontsize=10)
        if name in LOWER_IS_BETTER:
            axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7)
    figure.savefig(file)
