"""Limits for ratios between two sides, and whether a comparison meets them; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kvd.bench.measure import Results, ratio


@dataclass(frozen=True)
class Bar:
    """A limit for the ratio of one measure between two sides."""

    what: str
    trace: str
    measure: str
    ours: str
    theirs: str
    limit: float
    at_least: bool


@dataclass(frozen=True)
class Verdict:
    """A bar with the measured ratio, which is nan if one of the sides was not run."""

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
    sides = results.get(bar.trace, {})
    if not sides.get(bar.ours) or not sides.get(bar.theirs):
        return math.nan
    return ratio(sides[bar.ours], sides[bar.theirs], bar.measure)
