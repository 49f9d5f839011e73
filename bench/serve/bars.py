"""Limits for measures of a side or for ratios between sides, and whether they are met; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvd.bench.measure import Results, median, ratio, ratios


@dataclass(frozen=True)
class Bar:
    """A limit for the ratio of one measure between two sides, or for the measure of one side."""

    what: str
    trace: str
    measure: str
    ours: str
    theirs: str
    """The reference; empty for a limit of the measure itself."""
    limit: float
    at_least: bool
    every_run: bool = False
    """Whether each run must meet the limit, the first one included, and not only the median."""
    than: str = ""
    """Trace of ``theirs``, if it is another one. The ratio is then that of the medians."""


@dataclass(frozen=True)
class Verdict:
    """A bar with the measured ratio, which is nan if one of the sides was not run.

    Without ``theirs``, ``ratio`` is the measure. With ``every_run``, it is that of the worst run.
    """

    bar: Bar
    ratio: float

    @property
    def passed(self) -> bool | None:
        """Whether the ratio is within the limit; None if it was not measured."""
        if math.isnan(self.ratio):
            return None
        bar = self.bar
        return self.ratio >= bar.limit if bar.at_least else self.ratio <= bar.limit


def judge(bars: Iterable[Bar], results: Results) -> list[Verdict]:
    """Compare every bar with the results."""
    return [Verdict(bar, _ratio_of(bar, results)) for bar in bars]


def _ratio_of(bar: Bar, results: Results) -> float:
    ours = results.get(bar.trace, {}).get(bar.ours)
    theirs = results.get(bar.than or bar.trace, {}).get(bar.theirs)
    if not ours or (bar.theirs and not theirs):
        return math.nan
    if not theirs:
        return median(ours).get(bar.measure, math.nan)
    if bar.than:
        return median(ours)[bar.measure] / median(theirs)[bar.measure]
    if bar.every_run:
        return (min if bar.at_least else max)(ratios(ours, theirs, bar.measure))
    return ratio(ours, theirs, bar.measure)
