"""What an engine does about a step that lacked memory: everybody goes on, or one fails.

The first time nobody fails for it; each time after that, the request that is worth least.

Does not cover: how the device says so (`shortage`), how rows are brought back (`recovery`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.worker.process import shortage
from protocol.errors import KvdError, Overloaded

if TYPE_CHECKING:
    from kvd.worker.core.hands import Hands
    from kvd.worker.core.preemption import Preemption
    from kvd.worker.core.reclaiming import Reclaiming
    from kvd.worker.core.recovery import Recovery
    from kvd.worker.core.request import Completion, Request
    from kvd.worker.process.shortage import Shortage
    from protocol.worker import Report

CALM_STEPS = 256
"""Steps after which a shortage of memory counts as the first: some pages of every row's way."""
COME_BACK_S = 5.0
"""For who failed for want of memory: others end, or other models give some back."""

_log = logging.getLogger("kvd.worker")


class OutOfMemory:
    """The shortages of one engine. Tell `went_well` of each step, or `after` with what it lacked.

    ``forget``: what is in flight; ``redraw``: begin anew to keep how rows are drawn.
    """

    def __init__(
        self,
        hands: Hands,
        recovery: Recovery,
        parking: Preemption,
        reclaiming: Reclaiming,
        *,
        forget: Callable[[], None],
        redraw: Callable[[], None],
        release: Callable[[Request, Completion], None],
        fail: Callable[[Request, KvdError], None],
    ) -> None:
        self._hands = hands
        self._recovery = recovery
        self._preemption = parking
        self._reclaiming = reclaiming
        self._forget = forget
        self._redraw = redraw
        self._release = release
        self._fail = fail
        self.count = 0
        """Steps in a row that lacked memory, but for calm ones between."""
        self.calm = 0

    def went_well(self) -> None:
        """Note a step that lacked nothing."""
        self.calm += 1

    def after(self, short: Shortage) -> list[Report]:
        """Make room, and bring back what the step has spoiled: at most, all rows."""
        if self.calm >= CALM_STEPS:
            self.count = 0
        self.calm = 0
        hands = self._hands
        can_take_back = not (self.count or short.in_flight_lost)
        if can_take_back and self._recovery.take_back(hands.requests.values(), hands.drain):
            self.count = 1
            _log.warning("out of memory in a prompt's chunk: %s", short.reason)
            return []
        self._forget()
        self._preemption.abandon()
        reports = self._reclaiming.abandon()
        lacking: Shortage | None = short
        while lacking is not None:
            self.count += 1
            _log.warning("out of memory in a step: %s", lacking.reason)
            self._release_ended()
            if self.count > 1:
                self._fail_one(lacking)
            lacking = shortage.attempt(self._start_over, lacking.in_flight_lost)
        return reports

    def _start_over(self, late: bool) -> None:
        requests, hands = self._hands.requests.values(), self._hands
        self._recovery.clear(requests, late=late)
        self._redraw()
        self._recovery.bring_back(requests, hands.join)
        for request in requests:
            if hands.scheduler.is_admitted(request.rid):
                self._preemption.restore(request)

    def _release_ended(self) -> None:
        for request in list(self._hands.requests.values()):
            for completion in [one for one in request.completions if one.ended]:
                self._release(request, completion)

    def _fail_one(self, short: Shortage) -> None:
        victims = self._hands.scheduler.victims()
        if not victims:
            raise short
        self._fail(
            self._hands.requests[victims[0]],
            Overloaded(
                "the device ran out of memory again and again, and of the requests that ran this"
                " was the newest: send it again later; if that keeps happening, lower the budget"
                " or max_rows",
                retry_after_s=COME_BACK_S,
            ),
        )
