"""Handles steps that run out of memory: rebuilds all rows, and fails requests one by one.

The first shortage fails no request. Each further one within `CALM_STEPS` steps fails the least
valuable running request.
"""

from __future__ import annotations

import logging

from kvd.worker.core.batch import Batch
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.reclaiming import Reclaiming
from kvd.worker.core.recovery import Recovery
from kvd.worker.process import shortage
from kvd.worker.process.shortage import Shortage
from protocol.errors import Overloaded

CALM_STEPS = 256
"""Steps without a shortage, after which the next one counts as the first again.

By then each decoding row has filled 4 more pages, so it is a new shortage.
"""
RETRY_AFTER_S = 5.0
"""Seconds after which the client of a failed request may retry.

By then other requests may have ended, or other models may have returned memory.
"""

_log = logging.getLogger("kvd.worker")


class OutOfMemory:
    """The shortages of one engine. Call `step_succeeded` or `step_failed` after each step."""

    def __init__(
        self, batch: Batch, recovery: Recovery, preemption: Preemption, reclaiming: Reclaiming
    ) -> None:
        self._batch = batch
        self._recovery = recovery
        self._preemption = preemption
        self._reclaiming = reclaiming
        self.count = 0
        """Shortages so far, each less than `CALM_STEPS` steps after the one before it."""
        self.calm_steps = 0
        """Steps since the last shortage."""

    def step_succeeded(self) -> None:
        self.calm_steps += 1

    def step_failed(self, short: Shortage) -> None:
        """Free memory; undo a failed prefill if that is enough, otherwise rebuild all rows."""
        if self.calm_steps >= CALM_STEPS:
            self.count = 0
        self.calm_steps = 0
        if not self.count and not short.in_flight_lost and self._recovery.undo_prefill():
            self.count = 1
            _log.warning("out of memory during prefill: %s", short.reason)
            return
        self._batch.discard_step()
        self._preemption.abandon()
        self._reclaiming.abandon()
        failure: Shortage | None = short
        while failure is not None:
            self.count += 1
            _log.warning("out of memory in a step: %s", failure.reason)
            if self.count > 1:
                self._fail_one(failure)
            failure = shortage.attempt(self._rebuild, failure.in_flight_lost)

    def _rebuild(self, late: bool) -> None:
        batch = self._batch
        self._recovery.discard(late=late)
        self._recovery.rebuild()
        for request in batch.requests.values():
            if batch.scheduler.is_admitted(request.rid):
                self._preemption.rows.restore(request)

    def _fail_one(self, short: Shortage) -> None:
        victims = self._batch.scheduler.victims()
        if not victims:
            raise short
        error = Overloaded(
            "the device ran out of memory repeatedly, and this was the newest of the running"
            " requests: retry later; if it happens again, lower the budget or max_rows",
            retry_after_s=RETRY_AFTER_S,
        )
        self._batch.fail(self._batch.requests[victims[0]], error)
