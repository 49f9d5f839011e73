"""Limits the time that a step spends on transfers, so that decoding rows are hardly delayed."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SECONDS = 0.010
"""Maximum seconds that a step spends on growing pools or on transfers."""
STEP_SHARE = 0.25
"""Share of a usual decode step for this work. The 99th percentile between tokens should stay within
1.3 times the undisturbed one."""
_NEWEST_WEIGHT = 0.1


@dataclass
class Pace:
    """Averages the duration of usual decode steps, and derives the time for transfers from it.

    A usual step prefills nothing and writes no pages.
    """

    _usual_s: float | None = None
    """Running mean; None before the first usual step."""

    def note_usual(self, seconds: float) -> None:
        """Add the duration of a usual decode step."""
        mean = seconds if self._usual_s is None else self._usual_s
        self._usual_s = mean + _NEWEST_WEIGHT * (seconds - mean)

    def seconds(self, *, decodes: bool) -> float:
        """Return the time for transfers in a step; ``decodes``: whether rows decode in it."""
        if not decodes:
            return MOST_SECONDS
        usual_s = MOST_SECONDS if self._usual_s is None else self._usual_s
        return min(MOST_SECONDS, STEP_SHARE * usual_s)
