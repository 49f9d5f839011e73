"""Ratios between sides, first runs, repeated traces, and the best setting of a server; pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.llama import settings
from bench.serve.sides import PLAIN
from kvd.bench.measure import Measures, Results, median, ratios

BEST_LLAMA = "best llama"
"""Stands for the setting of llama-server with the most tokens per second in a trace."""
MEASURES = ("tok_s", "ttft_p50", "ttft_p99", "itl_p99", "cpu_ms_per_token", "peak_bytes")


def best_llama(sides: Mapping[str, Sequence[Measures]]) -> str | None:
    """Return the setting of llama-server with the highest median of tokens per second."""
    found = {
        side: median(runs)["tok_s"]
        for side, runs in sides.items()
        if side in settings.SETTINGS and runs
    }
    return max(found, key=found.__getitem__, default=None)


def with_best(results: Results) -> dict[str, dict[str, Sequence[Measures]]]:
    """Return the results with the side `BEST_LLAMA` in each trace that llama-server ran."""
    found: dict[str, dict[str, Sequence[Measures]]] = {}
    for trace, sides in results.items():
        name = best_llama(sides)
        found[trace] = dict(sides) | ({BEST_LLAMA: sides[name]} if name else {})
    return found


def compared(sides: Mapping[str, Sequence[Measures]]) -> list[tuple[str, str]]:
    """Return the pairs of a side of kvd and a side that it is compared with."""
    references = [one for one in (PLAIN, BEST_LLAMA) if sides.get(one)]
    return [
        (ours, theirs)
        for theirs in references
        for ours, runs in sides.items()
        if ours.startswith("kvd ") and runs
    ]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the first run's value, the median of the others, and the extremes."""
    numbers = [one for one in values if not math.isnan(one)] or [math.nan]
    others = [one for one in values[1:] if not math.isnan(one)] or [math.nan]
    return {
        "median": statistics.median(numbers),
        "first": values[0] if values else math.nan,
        "others": statistics.median(others),
        "least": min(numbers),
        "most": max(numbers),
    }


def as_json(results: Results) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Return the ratios within runs, by trace, pair and measure."""
    return {
        trace: {
            f"{ours} / {theirs}": {
                name: summary(ratios(sides[ours], sides[theirs], name)) for name in MEASURES
            }
            for ours, theirs in compared(sides)
        }
        for trace, sides in with_best(results).items()
    }


def again(results: Results) -> dict[str, dict[str, dict[str, float]]]:
    """Return the ratios of medians of traces played again to those before, by trace and side."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for later in results:
        before, repeated, _ = later.partition(" #")
        for side, runs in results[later].items() if repeated else ():
            if runs and (earlier := results.get(before, {}).get(side)):
                new, old = median(runs), median(earlier)
                row = {one: new[one] / old[one] for one in MEASURES if one in new and old.get(one)}
                found.setdefault(later, {})[side] = row
    return found


def firsts(results: Results) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the measures of each first run and the medians of the others, by trace and side."""
    return {
        trace: {
            side: {"first": median(runs[:1]), "others": median(runs[1:])}
            for side, runs in sides.items()
            if len(runs) > 1
        }
        for trace, sides in results.items()
    }
