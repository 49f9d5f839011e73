"""The router's side of the records: what it writes down, and who may still be fetched.

Where there are no records nothing is kept, and `name` is empty. A saved request waits until its
client attaches, and is dropped when nobody does in time. While it runs again it stays saved until
a worker has it, so that a refusal costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from actors.request_journal import ReportReceived, RequestDropped, RequestReceived
from protocol import worker as wire
from protocol.errors import UnknownRequest

if TYPE_CHECKING:
    from actors.request_journal import RequestJournal, SavedRequest

KEEP_S = 600.0
"""Ample for a daemon that a person starts again; each request holds its text in memory."""
_TOLD = (
    wire.RowAccepted,
    wire.RowPrompt,
    wire.RowTokens,
    wire.ChoiceFinished,
    wire.RowFinished,
    wire.RowFailed,
)


@dataclass
class SavedRequests:
    """Requests beyond the daemon's life."""

    records: RequestJournal | None = None
    saved: dict[str, SavedRequest] = field(default_factory=dict)
    """Of a daemon before this one."""
    keep_s: float = KEEP_S
    """How long those wait for their clients."""
    began_at: float = 0.0
    """On the event loop's clock."""
    expires_at: float | None = None

    def name(self, rid: str) -> str:
        """Return what a client can attach by; empty: nothing is kept."""
        return rid if self.records is not None else ""

    def begin(self, now: float) -> None:
        """Let the time run after which nobody comes any more."""
        if self.expires_at is None:
            self.began_at, self.expires_at = now, now + self.keep_s

    @property
    def deadline(self) -> float | None:
        """When `expire` has something to do."""
        return self.expires_at if self.saved else None

    def expire(self, now: float, running: set[str]) -> list[str]:
        """Drop those that nobody came for in time, but for ``running`` ones; return their ids."""
        if self.expires_at is None or now < self.expires_at:
            return []
        late = [rid for rid in self.saved if rid not in running]
        for rid in late:
            self.forget(rid)
        self.expires_at = now + self.keep_s  # for those that run, and are refused yet
        return late

    def deadline_of(self, saved: SavedRequest) -> float | None:
        """Return when a request is of no use any more."""
        return None if saved.deadline_s is None else self.began_at + saved.deadline_s

    def find(self, rid: str) -> SavedRequest:
        """Return a saved request; raises `UnknownRequest`."""
        found = self.saved.get(rid)
        if found is None:
            raise UnknownRequest(
                f"no request {rid!r} waits for its client: it is over, expired, was never kept or "
                "belongs to a connection that is open",
                request=rid,
            )
        return found

    def asked(self, rid: str, model: str, submit: wire.Submit) -> None:
        """Note a new request."""
        if self.records is not None:
            self.records.write(RequestReceived(rid, model, submit))

    def heard(self, rid: str, report: wire.Report) -> None:
        """Note a worker's word, before its client has it; a saved request is saved no more."""
        if self.records is not None and isinstance(report, _TOLD):
            self.saved.pop(rid, None)
            self.records.write(ReportReceived(rid, report))

    def forget(self, rid: str) -> None:
        """Note that nobody will come for a request."""
        self.saved.pop(rid, None)
        if self.records is not None:
            self.records.write(RequestDropped(rid))
