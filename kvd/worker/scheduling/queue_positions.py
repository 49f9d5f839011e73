"""Reports of queue positions: exact near the front, approximate behind.

When the head of a queue of n requests is admitted, n positions change. Reporting each change would
take a number of reports quadratic in n. Therefore only the first `EXACT` positions are reported
exactly. Behind them, a position is reported when it differs by an eighth from the last reported
one. That makes about 8 + 8 ln(n / 8) reports per request.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocol.worker import RowQueued

EXACT = 8


class QueuePositions:
    """Last reported position of each request. Call `updates` once per step."""

    def __init__(self) -> None:
        self.stale = False
        """Whether `updates` may return reports. Set when a request joins or leaves the queue."""
        self._reported: dict[str, int] = {}

    def forget(self, rid: str) -> None:
        if self._reported.pop(rid, None) is not None:
            self.stale = True

    def updates(self, queue: Sequence[str]) -> list[RowQueued]:
        """Return the reports that are due; requests outside ``queue`` are forgotten."""
        if not self.stale:
            return []
        self.stale = False
        previous, self._reported = self._reported, {}
        reports = []
        for position, rid in enumerate(queue, 1):
            before = previous.get(rid)
            if before is None or _differs(before, position):
                reports.append(RowQueued(rid=rid, position=position))
                before = position
            self._reported[rid] = before
        return reports


def _differs(before: int, now: int) -> bool:
    if min(before, now) <= EXACT:
        return before != now
    return abs(before - now) * 8 >= before
