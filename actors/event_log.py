"""The newest actions of the governor and other actors, which clients read with ``events``.

Each record also goes to the log file.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from actors import telemetry
from actors.ports import Level, Notice, Notify, Observe
from protocol.messages import EventRecord

MAX_RECORDS = 4096
"""Records kept: about a day of a busy daemon, in 2 MB."""


@dataclass
class EventLog:
    """The newest records."""

    notify: Notify
    observe: Observe
    clock: Callable[[], float] = time.time
    records: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=MAX_RECORDS))
    last: int = 0
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
        """Record what was done to `model`, on behalf of the model `requester`."""
        self.last += 1
        record = EventRecord(
            id="",
            seq=self.last,
            at=self.clock(),
            kind=kind,
            model=model or None,
            reason=reason,
            requester=requester,
            numbers=numbers or {},
        )
        self.records.append(record)
        self.observe(telemetry.ActionRecorded(model or "", kind))
        fields = {"reason": reason, "requester": requester, "numbers": numbers}
        self.notify(Notice(f"governor_{kind}", level, {"model": model or None, **fields}))
        for follower in list(self.followers.values()):
            follower(record)

    def since(self, number: int, model: str | None = None) -> list[EventRecord]:
        return [
            record for record in self.records if record.seq > number and concerns(record, model)
        ]


def concerns(record: EventRecord, model: str | None) -> bool:
    return model is None or model in {record.model, record.requester} or record.model is None
