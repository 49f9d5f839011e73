"""Tables and plot of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.llama import settings
from bench.serve.bars import Verdict
from bench.serve.ratios import (
    BEST_LLAMA,
    MEASURES,
    again,
    best_llama,
    compared,
    firsts,
    with_best,
)
from bench.serve.sides import PLAIN
from kvd.bench.measure import Measures, Results, median, ratio
from kvd.bench.report import COLUMNS, LOWER_IS_BETTER

_HEADINGS = {"ttft_p99": "TTFT p99 ms", "itl_p99": "gap p99 ms"}
"""Headings of tables in which a measure does not follow its median."""


def tables(results: Results, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print a table for each trace with its ratios, first runs, repeated traces, and the bars."""
    for trace, sides in results.items():
        console.print(trace_table(trace, sides))
    for table in (first_runs_table(results), again_table(results), bars_table(verdicts)):
        if table.row_count:
            console.print(table)


def trace_table(trace: str, sides: Mapping[str, Sequence[Measures]]) -> Table:
    """Return a table of the medians over runs, one row for each side, and the ratios.

    Ratios are to `PLAIN`, and those of kvd also to the best setting of llama-server.
    """
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
        table.add_row(side, *_cells(row, shown))
    table.add_section()
    for side, runs in sides.items():
        if side not in {PLAIN, *settings.SETTINGS} and runs and sides.get(PLAIN):
            table.add_row(f"{side} / {PLAIN}", *_ratios(runs, sides[PLAIN], shown))
    best = best_llama(sides)
    every = with_best({trace: sides})[trace]
    for ours, theirs in compared(every):
        if theirs == BEST_LLAMA:
            table.add_row(f"{ours} / {best}", *_ratios(every[ours], every[theirs], shown))
    return table


def first_runs_table(results: Results) -> Table:
    """Return a table of each side's first run and of the medians of its other runs."""
    table = _short_table("first runs, and medians of the others", "trace", "server", "runs")
    for trace, sides in firsts(results).items():
        for side, found in sides.items():
            for name, row in found.items():
                table.add_row(trace, side, name, *_cells(row, MEASURES))
    return table


def again_table(results: Results) -> Table:
    """Return a table of the ratios of traces that were played again to those before."""
    table = _short_table("played again, relative to before", "trace", "server")
    for later, sides in again(results).items():
        for side, row in sides.items():
            cells = (_number(row.get(name, math.nan), 1, 3) for name in MEASURES)
            table.add_row(later, side, *cells)
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
        reference = bar.than or bar.theirs
        digits = 2 if bar.theirs else 4
        table.add_row(
            bar.what, bar.trace, bar.ours, reference, _number(one.ratio, 1, digits), limit, word
        )
    return table


def _short_table(caption: str, *headings: str) -> Table:
    table = Table(title=caption)
    for heading in headings:
        table.add_column(heading)
    for name in MEASURES:
        table.add_column(_HEADINGS.get(name, COLUMNS[name][0]), justify="right")
    return table


def _cells(row: Mapping[str, float], names: Sequence[str]) -> list[str]:
    return [_number(row.get(name, math.nan), *COLUMNS[name][1:]) for name in names]


def _ratios(
    ours: Sequence[Measures], theirs: Sequence[Measures], names: Sequence[str]
) -> list[str]:
    return [_number(ratio(ours, theirs, name), 1, 2) for name in names]


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
