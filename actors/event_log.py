"""What was done under the one budget, and why: a ring that everybody may read and follow.

The governor records what it does; others may record what users should find beside it. Each record
goes to the log as well. Does not cover metrics, nor what happens inside one request.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors import telemetry
from actors.ports import Notice, ignore_observation
from protocol.messages import EventRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from actors.ports import Level, Notify, Observe

MOST = 4096
"""Records that are kept: about a day of a busy daemon, in two megabytes."""


@dataclass
class EventLog:
    """The newest records."""

    notify: Notify
    observe: Observe = ignore_observation
    clock: Callable[[], float] = time.time
    records: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MOST))
    last: int = 0
    """The number of the newest."""
    followers: dict[Hashable, Callable[[EventRecord], None]] = field(default_factory=dict)

    def record(
        self,
        kind: str,
        model: str | None,
        reason: str,
        *,
        requester: str | None = None,
        level: Level = "info",
        numbers: dict[str, int] | None = None,
    ) -> None:
        """Write down what was done to `model`, for `wisher`."""
        self.last += 1
        happened = EventRecord(
            id="",
            seq=self.last,
            at=self.clock(),
            kind=kind,
            model=model or None,
            reason=reason,
            requester=requester,
            numbers=numbers or {},
        )
        self.records.append(happened)
        self.observe(telemetry.ActionRecorded(model or "", kind))
        fields = {
            "model": model or None,
            "reason": reason,
            "requester": requester,
            "numbers": numbers,
        }
        self.notify(Notice(f"governor_{kind}", level, fields))
        for tell in list(self.followers.values()):
            tell(happened)

    def since(self, number: int, model: str | None = None) -> list[EventRecord]:
        """Return what came after this number, of one model or of all."""
        return [it for it in self.records if it.seq > number and concerns(it, model)]


def concerns(it: EventRecord, model: str | None) -> bool:
    """Return whether a record is about this model, or any, if none is named."""
    return model is None or model in {it.model, it.requester} or it.model is None
