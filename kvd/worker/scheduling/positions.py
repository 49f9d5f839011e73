"""Who waits at which place of the queue, told when it matters: exactly in front, roughly behind.

A queue of n requests whose head is admitted moves n places. Told each time, that would be as many
reports as requests squared; so the first `EXACT` places are told one by one, and behind them a
place once it is an eighth smaller or larger than the one told before: some 8 + 8 ln(n / 8) reports
a request.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.worker import RowQueued

EXACT = 8
"""Places that are told one by one."""


class Positions:
    """What was told to whom. Call `changed` when the queue did, and `news` once a step."""

    def __init__(self) -> None:
        self.stale = False
        """Whether `news` may have something to say."""
        self._told: dict[str, int] = {}

    def changed(self) -> None:
        """Note that somebody came, or went on."""
        self.stale = True

    def forget(self, rid: str) -> None:
        """Note that a request is over."""
        if self._told.pop(rid, None) is not None:
            self.stale = True

    def news(self, line: Sequence[str]) -> list[RowQueued]:
        """Return what is to be told of this queue; who is not in it waits no more."""
        if not self.stale:
            return []
        self.stale = False
        told, self._told = self._told, {}
        reports = []
        for position, rid in enumerate(line, 1):
            before = told.get(rid)
            self._told[rid] = before or position
            if before is None or _differs(before, position):
                self._told[rid] = position
                reports.append(RowQueued(rid=rid, position=position))
        return reports


def _differs(before: int, now: int) -> bool:
    if min(before, now) <= EXACT:
        return before != now
    return abs(before - now) * 8 >= before
