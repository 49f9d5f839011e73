"""Whether memory is tight: watermarks with hysteresis, system pressure, and a forecast. Pure.

Memory is *tight* from the high watermark on, until it has been below the low one for a while. Two
values are compared with the watermarks. The first is the memory of rows, now and extrapolated by a
few seconds, relative to what weights leave of the budget. The second is the measured use, relative
to the budget. While memory is tight, new rows start at lower precision, one level at a time.
Afterwards they start at level 0 again.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Pressure = Literal["normal", "warning", "critical"]


class Marks(msgspec.Struct, frozen=True):
    """The watermarks, as parts of the budget, and their times."""

    high: float = 0.95
    low: float = 0.85
    cool_s: float = 10.0
    """Minimum seconds between two rises of the start level, between two reactions to the system's
    pressure, and below the low watermark before memory is calm again."""
    horizon_s: float = 10.0
    """Seconds by which growth is extrapolated: about what a model's rows take to step down."""
    smooth_s: float = 30.0
    """Seconds over which growth is averaged: one large request is no trend."""


class MemorySample(msgspec.Struct, frozen=True):
    """Memory in use at one time, in bytes."""

    room: int
    """Part of the budget that weights and other fixed memory leave."""
    rows: int
    """Part of `room` that rows hold, without spare memory and unused prefixes."""
    measured: int
    """Use of all workers, as measured by the system or the accelerator, without unused prefixes;
    0: not known."""
    budget: int
    waits: bool = False
    """A loaded model's request has waited so long that methods without a cost cannot serve it, or
    grants and excess are clearly above the budget."""


class Gauge(msgspec.Struct):
    """Whether memory is tight, and the level at which new rows start."""

    marks: Marks = Marks()
    pressure: Pressure = "normal"
    tight: bool = False
    calm_since: float | None = None
    """While tight: since when no cause remains."""
    level: int = 0
    stepped_at: float | None = None
    rows: int = 0
    at: float | None = None
    trend: float = 0.0
    """Recent growth of the rows' memory, in bytes per second."""
    reason: str = ""

    def update(self, sample: MemorySample, lowest_level: int, now: float) -> None:
        """Take a sample. ``lowest_level``: the lowest precision level of any model."""
        self._update_trend(sample.rows, now)
        cause = self._cause(sample, self.marks.high)
        if cause:
            self.tight, self.calm_since, self.reason = True, None, cause
        elif self.tight and not self._cause(sample, self.marks.low):
            self.calm_since = now if self.calm_since is None else self.calm_since
            if now - self.calm_since >= self.marks.cool_s:
                self.tight, self.calm_since, self.level, self.reason = False, None, 0, ""
        else:
            self.calm_since = None
        may_step = self.stepped_at is None or now - self.stepped_at >= self.marks.cool_s
        if cause and may_step and self.level < lowest_level:
            self.level, self.stepped_at = self.level + 1, now

    @property
    def predicted_growth(self) -> int:
        """Bytes by which rows will have grown after `Marks.horizon_s`."""
        return int(max(0.0, self.trend) * self.marks.horizon_s)

    def _update_trend(self, rows: int, now: float) -> None:
        if self.at is not None and now > self.at:
            elapsed = now - self.at
            weight = 1.0 - math.exp(-elapsed / self.marks.smooth_s)
            self.trend += weight * ((rows - self.rows) / elapsed - self.trend)
        elif self.at is not None:
            return  # a second sample at the same time: the next one includes its growth
        self.rows, self.at = rows, now

    def _cause(self, sample: MemorySample, mark: float) -> str:
        if self.pressure != "normal":
            return f"the system's memory pressure is {self.pressure}"
        if sample.measured >= mark * sample.budget:
            return "measured use is near the budget"
        if sample.waits:
            return "requests wait for memory"
        if sample.rows and sample.rows >= mark * sample.room:
            return "rows use nearly all memory that weights leave"
        if sample.rows and sample.rows + self.predicted_growth >= mark * sample.room:
            return "rows grow, and will soon use nearly all memory that weights leave"
        return ""
