"""Which state each request is in, and the account of places and pages that goes with it.

::

    add              admit                advance               remove
    ---> waiting ------------> prefilling --------> decoding ------------>
            ^                      |                    |
            | unpark               |        park        |
            +---------- parked <---+--------------------+

Admitted are those that prefill or decode: each of their choices takes a place, and their pages are
reserved. The others have no place, and of their pages what a row kept when it was parked.

Does not cover: who is admitted and what runs (`kvd.worker.scheduling.scheduler`).
"""

from __future__ import annotations

from kvd.worker.scheduling.queue import Line
from kvd.worker.scheduling.row import Row
from protocol.errors import LocalProtocolError


class States:
    """The requests of one scheduler. Illegal moves raise `LocalProtocolError`."""

    def __init__(self, line: Line) -> None:
        self.line = line
        """Those that wait."""
        self.rows: dict[str, Row] = {}
        """All of them; each is in the line or in exactly one of the next three."""
        self.prefilling: dict[str, Row] = {}
        self.decoding: dict[str, Row] = {}
        self.preempted: dict[str, Row] = {}
        self.places = 0
        self.reserved = 0
        self.paused = 0
        """Admitted rows that get no tokens."""

    def find(self, rid: str) -> Row:
        """Return a request in whatever state."""
        row = self.rows.get(rid)
        if row is None:
            raise LocalProtocolError(f"row {rid} is not scheduled")
        return row

    def admitted(self, rid: str) -> Row:
        """Return a row that prefills or decodes."""
        row = self.prefilling.get(rid) or self.decoding.get(rid)
        if row is None:
            raise LocalProtocolError(f"row {rid} is not admitted")
        return row

    def is_admitted(self, row: Row) -> bool:
        """Return whether the row has places."""
        return row.rid in self.prefilling or row.rid in self.decoding

    def add(self, row: Row) -> None:
        """Let a new request wait."""
        self.rows[row.rid] = row
        self.line.join(row)

    def admit(self, row: Row) -> None:
        """Take a request from the line and give it its places and pages."""
        self.line.leave(row)
        self.reserved += row.pages - row.kept
        self.places += row.choices
        row.kept = 0
        row.started = True
        self.advance(row, row.prefilled)

    def advance(self, row: Row, prefilled: int) -> None:
        """Note how far an admitted row's prompt is; once it is through, the row decodes."""
        row.prefilled = prefilled
        if row.left:
            self.prefilling[row.rid] = row
        else:
            self.prefilling.pop(row.rid, None)
            self.decoding[row.rid] = row

    def restart(self, row: Row) -> None:
        """Note that nothing of a request's prompt is in the cache any more."""
        row.reads = False
        row.prefilled = 0
        if self.is_admitted(row):
            self.decoding.pop(row.rid, None)
            self.advance(row, 0)

    def remove(self, row: Row) -> int:
        """Forget a request in whatever state; return the pages that it gives back."""
        del self.rows[row.rid]
        if self.is_admitted(row):
            return self._dismiss(row)
        if self.preempted.pop(row.rid, None) is None:
            self.line.leave(row)
        self.reserved -= row.kept
        return row.kept

    def remove_choice(self, rid: str) -> int:
        """Forget one of several choices; return the pages that it gives back."""
        row = self.decoding.get(rid)
        if row is None or row.choices == 1:
            raise LocalProtocolError(f"row {rid} does not decode several choices")
        row.choices -= 1
        self.places -= 1
        self.reserved -= row.more_pages
        return row.more_pages

    def resize(self, row: Row, level: int, first_pages: int, more_pages: int) -> int:
        """Count a request at another level; return the pages that it gives back."""
        before = row.pages
        row.level, row.first_pages, row.more_pages = level, first_pages, more_pages
        given = before - row.pages if self.is_admitted(row) else 0
        self.reserved -= given
        return given

    def pause(self, rid: str) -> None:
        """Let an admitted row have no tokens."""
        row = self.admitted(rid)
        if row.paused:
            raise LocalProtocolError(f"row {rid} is paused already")
        row.paused = True
        self.paused += 1

    def resume(self, rid: str) -> None:
        """Let a paused row go on."""
        row = self.admitted(rid)
        if not row.paused:
            raise LocalProtocolError(f"row {rid} is not paused")
        row.paused = False
        self.paused -= 1

    def preempt(self, rid: str, kept: int) -> int:
        """Take an admitted row's places and pages but ``kept``; return those that it gives back.

        What it keeps may be more than its pages: its tail goes with it, and tails are counted by
        place while rows run.
        """
        row = self.admitted(rid)
        if kept < 0:
            raise LocalProtocolError(f"row {rid} cannot keep {kept} pages")
        given = self._dismiss(row) - kept
        row.kept = kept
        self.reserved += kept
        self.preempted[rid] = row
        return given

    def keep(self, rid: str, kept: int) -> int:
        """Let a row that is not admitted keep fewer pages; return those that it gives back."""
        row = self.find(rid)
        if self.is_admitted(row) or not 0 <= kept <= row.kept:
            raise LocalProtocolError(f"row {rid} is not parked with {kept} pages or more")
        given = row.kept - kept
        row.kept = kept
        self.reserved -= given
        return given

    def unpark(self, rid: str) -> None:
        """Let a parked row wait, at the place of its arrival."""
        row = self.preempted.pop(rid, None)
        if row is None:
            raise LocalProtocolError(f"row {rid} is not parked")
        self.line.join(row)

    def _dismiss(self, row: Row) -> int:
        self.prefilling.pop(row.rid, None)
        self.decoding.pop(row.rid, None)
        self.paused -= row.paused
        row.paused = False
        self.places -= row.choices
        self.reserved -= row.pages
        return row.pages

    def check(self) -> None:
        """Assert the invariants."""
        waiting = list(self.line)
        away = [*waiting, *self.preempted.values()]
        admitted = [*self.prefilling.values(), *self.decoding.values()]
        names = [row.rid for row in [*away, *admitted]]
        assert len(names) == len(set(names)), "a row is in two states"
        assert set(names) == set(self.rows), "a row is in no state"
        assert waiting == sorted(waiting, key=lambda row: row.place), "the line is out of order"
        assert self.places == sum(row.choices for row in admitted), "places got lost"
        pages = sum(row.pages for row in admitted) + sum(row.kept for row in away)
        assert self.reserved == pages, "pages got lost"
        assert self.paused == sum(row.paused for row in admitted)
        assert not any(row.paused for row in away)
        assert not any(row.kept for row in admitted)
        assert all(row.started for row in [*self.preempted.values(), *admitted])
        assert all(row.started or not (row.prefilled or row.kept) for row in waiting)
        assert all(row.left == 0 for row in self.decoding.values())
        assert all(row.left > 0 for row in self.prefilling.values())
