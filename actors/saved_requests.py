"""The router's side of the request journal.

Holds the requests of an earlier daemon until the time to attach is over. An attached request stays
saved until a worker reports on it, so that a refusal does not lose it. One that had ended stays
saved after an attach, because the client may lose its connection before it has read the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.request_journal import (
    ReportReceived,
    RequestDropped,
    RequestJournal,
    RequestReceived,
    SavedRequest,
)
from protocol import worker as wire
from protocol.errors import UnknownRequest

KEEP_S = 600.0
"""Seconds: enough for a person to restart a daemon. More would cost memory, because each saved
request holds its text in memory."""
_JOURNALED = (
    wire.RowAccepted,
    wire.RowPrompt,
    wire.RowTokens,
    wire.ChoiceFinished,
    wire.RowFinished,
    wire.RowFailed,
)


@dataclass
class SavedRequests:
    """Requests that survive a restart of the daemon."""

    journal: RequestJournal | None = None
    saved: dict[str, SavedRequest] = field(default_factory=dict)
    keep_s: float = KEEP_S
    """Seconds that `saved` waits for clients."""
    began_at: float = 0.0
    """When the wait began, on the event loop's clock."""
    expires_at: float | None = None

    def begin(self, now: float) -> None:
        """Start the timeout after which unclaimed requests are dropped."""
        if self.expires_at is None:
            self.began_at, self.expires_at = now, now + self.keep_s

    @property
    def deadline(self) -> float | None:
        """When to call `expire`."""
        return self.expires_at if self.saved else None

    def expire(self, now: float, running: set[str]) -> list[str]:
        """Drop expired requests, except those in ``running``; return the dropped ids."""
        if self.expires_at is None or now < self.expires_at:
            return []
        late = [rid for rid in self.saved if rid not in running]
        for rid in late:
            self.drop(rid)
        self.expires_at = now + self.keep_s  # requests in ``running`` may still be refused
        return late

    def deadline_of(self, saved: SavedRequest) -> float | None:
        """Return a request's own deadline on the event loop's clock."""
        return None if saved.deadline_s is None else self.began_at + saved.deadline_s

    def find(self, rid: str) -> SavedRequest:
        found = self.saved.get(rid)
        if found is None:
            raise UnknownRequest(
                f"no saved request {rid!r}: it ended or expired, was not journaled, or belongs to "
                "an open connection",
                request=rid,
            )
        return found

    def record_request(self, rid: str, model: str, submit: wire.Submit) -> str:
        """Return the name that a client attaches by; empty if the request is not journaled."""
        if self.journal is None or not self.journal.write(RequestReceived(rid, model, submit)):
            return ""
        return rid

    def record_report(self, rid: str, report: wire.RowReport) -> None:
        """Record a report before its client gets it; the request is no longer saved."""
        if self.journal is not None and isinstance(report, _JOURNALED):
            self.saved.pop(rid, None)
            self.journal.write(ReportReceived(rid, report))

    def drop(self, rid: str) -> None:
        """Drop a request, because no client will attach to it."""
        self.saved.pop(rid, None)
        if self.journal is not None:
            self.journal.write(RequestDropped(rid))
