"""When memory is short: watermarks with hysteresis, the system's own word, and a forecast. Pure.

Memory is *tight* from the high mark on and until it has been below the low one for a while. What is
compared with the marks is what rows take of the room that weights leave them, now and, by the
growth of the last seconds, a few seconds ahead; and what was measured, of the whole budget.
While it is tight new rows start lower on the ladder, a level at a time; then at the top again.

Does not cover what is done about it (`actors.machines.governor`).
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Pressure = Literal["normal", "warning", "critical"]


class Marks(msgspec.Struct, frozen=True):
    """The thresholds. Start high, stop low."""

    high: float = 0.95
    low: float = 0.85
    cool_s: float = 10.0
    """Between two steps of the same kind, and before calm is believed."""
    horizon_s: float = 10.0
    """How far growth is foreseen: about what it takes to step a model's rows down."""
    smooth_s: float = 30.0
    """Over which growth is averaged: one large request is no trend."""


class Readings(msgspec.Struct, frozen=True):
    """What there is, in bytes."""

    room: int
    """Of the budget, what weights and the like do not take."""
    rows: int
    """What rows have of it, spare memory and unused prefixes left out."""
    measured: int
    """What all workers take, as the system or the accelerator says; 0: not known."""
    budget: int
    waits: bool = False
    """Somebody waits, and nothing is left that costs no quality."""


class Gauge(msgspec.Struct):
    """Tight or not, and how far down new rows start."""

    marks: Marks = Marks()
    pressure: Pressure = "normal"
    tight: bool = False
    calm_since: float | None = None
    """While it is tight: since when nothing speaks for it any more."""
    level: int = 0
    stepped_at: float | None = None
    rows: int = 0
    at: float | None = None
    trend: float = 0.0
    """Bytes a second that rows grew by, lately."""
    reason: str = ""
    """Why it is tight."""

    def read(self, readings: Readings, most_levels: int, now: float) -> None:
        """Take readings; `most_levels`: of the longest ladder of any model."""
        self._follow(readings.rows, now)
        cause = self._cause(readings, self.marks.high)
        if cause:
            self.tight, self.calm_since, self.reason = True, None, cause
        elif self.tight and not self._cause(readings, self.marks.low):
            self.calm_since = now if self.calm_since is None else self.calm_since
            if now - self.calm_since >= self.marks.cool_s:
                self.tight, self.calm_since, self.level, self.reason = False, None, 0, ""
        else:
            self.calm_since = None
        may = self.stepped_at is None or now - self.stepped_at >= self.marks.cool_s
        if cause and may and self.level < most_levels:
            self.level, self.stepped_at = self.level + 1, now

    @property
    def ahead(self) -> int:
        """How much more rows will have in a few seconds."""
        return int(max(0.0, self.trend) * self.marks.horizon_s)

    def _follow(self, rows: int, now: float) -> None:
        if self.at is not None and now > self.at:
            passed = now - self.at
            part = 1.0 - math.exp(-passed / self.marks.smooth_s)
            self.trend += part * ((rows - self.rows) / passed - self.trend)
        elif self.at is not None:
            return  # several events of one moment: the next one sees the growth
        self.rows, self.at = rows, now

    def _cause(self, readings: Readings, mark: float) -> str:
        if self.pressure != "normal":
            return f"the system's memory pressure is {self.pressure}"
        if readings.measured >= mark * readings.budget:
            return "measured use is near the budget"
        if readings.waits:
            return "requests wait for memory"
        if readings.rows and readings.rows >= mark * readings.room:
            return "rows have nearly all room"
        if readings.rows and readings.rows + self.ahead >= mark * readings.room:
            return "rows grow, and will soon have nearly all room"
        return ""
