"""A clock that counts its readings, for work that must stop at the same point in every process.

Step-downs and the growth of pools stop after some seconds. In a gang, the leader repeats short
spans of `WORK_TICKS` until its time is over, and sends the number of ticks of each span.
"""

from __future__ import annotations

WORK_TICKS = 8
"""Readings of a span: at least one piece of work, and up to 20 pages once the pace is known."""


class Ticks:
    """A clock whose n-th reading is n."""

    def __init__(self) -> None:
        self._readings = 0

    def __call__(self) -> float:
        self._readings += 1
        return float(self._readings)
