"""Which rows are admitted, prefilled and decoded in a step: integers only, no tensors, no clock.

A request is *waiting*, then *prefilling* (its prompt runs in chunks), then *decoding*; it leaves
from any of these by `Scheduler.finish`. Every step decodes all decoding rows and prefills at most
one chunk, so a long prompt never stalls the others for more than its chunk.

Does not cover: which pages a row gets (`kvd.worker.cache`), what is drawn
(`kvd.worker.sampler`), when a completion is over (the engine says so).

Prompt of 300 tokens, C = 128; the last prompt token is the row's first decode input::

    0         128         256     299 300
    |--chunk---|--chunk----|-chunk-|d|
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvd.worker.cache.scheme import full_pages
from protocol.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt positions ``start`` to ``end`` (exclusive) of one row, to be prefilled."""

    rid: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What the next step does."""

    admitted: tuple[str, ...]
    """Rows that left the queue just now, in order; they also appear below."""
    prefill: Chunk | None
    decode: tuple[str, ...]
    wanted_pages: int
    """Pages that the head of the queue lacks; 0 if there is no head or only a place is missing."""
    hoped_pages: int = 0
    """Pages lacking for all requests of the queue that a place is free for."""


@dataclass(slots=True)
class _Row:
    rid: str
    prompt_len: int
    pages: int
    """Reserved at admission: the worst case, so that an admitted row never waits for memory."""
    prefilled: int = 0

    @property
    def prefill_end(self) -> int:
        return self.prompt_len - 1


class Scheduler:
    """First in, first out: the head of the queue is never overtaken.

    ``pages_for`` says how many pages a row of so many tokens fills at most. Call `plan`, run it,
    tell `prefilled` for its chunk, `finish` what is over, and `plan` again.
    """

    def __init__(
        self, *, max_rows: int, chunk: int, pages_for: Callable[[int], int] = full_pages
    ) -> None:
        if max_rows < 1 or chunk < 1:
            raise LocalProtocolError(f"max_rows {max_rows} and chunk {chunk} must be positive")
        self._max_rows = max_rows
        self._chunk = chunk
        self._pages_for = pages_for
        self._waiting: dict[str, _Row] = {}
        self._prefilling: dict[str, _Row] = {}
        self._decoding: dict[str, _Row] = {}
        self._turns: deque[str] = deque()
        """Prefilling rows; the leftmost has the next chunk."""
        self._reserved = 0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def head(self) -> str | None:
        """The request that is admitted next."""
        return next(iter(self._waiting), None)

    @property
    def prefilling(self) -> int:
        """Admitted rows whose prompt is not through."""
        return len(self._prefilling)

    @property
    def decoding(self) -> int:
        """Rows that get a token in each step."""
        return len(self._decoding)

    @property
    def requests(self) -> int:
        """All of them."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def reserved(self) -> int:
        """Pages that all admitted rows may take in the worst case."""
        return self._reserved

    def reservation(self, prompt_len: int, max_new: int) -> int:
        """Return the most pages that a row can ever fill."""
        return self._pages_for(prompt_len + max_new)

    def submit(self, rid: str, prompt_len: int, max_new: int) -> None:
        """Put a request at the end of the queue."""
        if self._find(rid) is not None:
            raise LocalProtocolError(f"row {rid} is scheduled already")
        if prompt_len < 1 or max_new < 1:
            raise LocalProtocolError(
                f"row {rid}: prompt_len {prompt_len} and max_new {max_new} must be positive"
            )
        self._waiting[rid] = _Row(rid, prompt_len, self.reservation(prompt_len, max_new))

    def plan(self, lacking: Callable[[int, int], int]) -> Plan:
        """Admit from the head of the queue what memory and places allow.

        ``lacking(pages, rows)`` says how many pages would be missing if so many rows were admitted
        and had reserved so many pages between them; none or less, and they fit.
        """
        admitted = []
        wanted = hoped = 0
        while self._waiting and self._running < self._max_rows:
            row = next(iter(self._waiting.values()))
            wanted = max(0, lacking(self._reserved + row.pages, self._running + 1))
            if wanted:
                hoped = self._hoped(lacking)
                break
            self._admit(row)
            admitted.append(row.rid)
        return Plan(tuple(admitted), self._next_chunk(), tuple(self._decoding), wanted, hoped)

    @property
    def _running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def _hoped(self, lacking: Callable[[int, int], int]) -> int:
        rows = list(itertools.islice(self._waiting.values(), self._max_rows - self._running))
        pages = self._reserved + sum(row.pages for row in rows)
        return lacking(pages, self._running + len(rows))

    def _admit(self, row: _Row) -> None:
        del self._waiting[row.rid]
        self._reserved += row.pages
        if row.prefilled == row.prefill_end:  # a prompt of one token
            self._decoding[row.rid] = row
        else:
            self._prefilling[row.rid] = row
            self._turns.append(row.rid)

    def _next_chunk(self) -> Chunk | None:
        if not self._turns:
            return None
        row = self._prefilling[self._turns[0]]
        return Chunk(row.rid, row.prefilled, self._cut(row))

    def _cut(self, row: _Row) -> int:
        """Return where the row's next chunk ends: on the absolute grid, or at the prompt's end.

        A chunk attends exactly to its own keys and to quantized ones before it, so a cut that
        moved with the load would change the result.
        """
        return min((row.prefilled // self._chunk + 1) * self._chunk, row.prefill_end)

    def prefilled(self, rid: str, end: int) -> None:
        """Note that the planned chunk of this row ran; the turn goes to the next row."""
        row = self._prefilling.get(rid)
        if row is None or self._turns[0] != rid or end != self._cut(row):
            raise LocalProtocolError(
                f"row {rid}: no chunk to {end} was planned (next is {self._next_chunk()})"
            )
        row.prefilled = end
        self._turns.popleft()
        if end == row.prefill_end:
            del self._prefilling[rid]
            self._decoding[rid] = row
        else:
            self._turns.append(rid)

    def finish(self, rid: str) -> int:
        """Forget a row in whatever state; return the pages that it gives back."""
        if self._waiting.pop(rid, None) is not None:
            return 0
        row = self._decoding.pop(rid, None)
        if row is None:
            row = self._prefilling.pop(rid, None)
            if row is None:
                raise LocalProtocolError(f"row {rid} is not scheduled")
            self._turns.remove(rid)
        self._reserved -= row.pages
        return row.pages

    def _find(self, rid: str) -> _Row | None:
        return self._waiting.get(rid) or self._prefilling.get(rid) or self._decoding.get(rid)

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        admitted = [*self._prefilling.values(), *self._decoding.values()]
        assert len(admitted) <= self._max_rows
        assert self._reserved == sum(row.pages for row in admitted)
        names = [*self._waiting, *self._prefilling, *self._decoding]
        assert len(names) == len(set(names))
        assert len(self._turns) == len(self._prefilling)
        assert set(self._turns) == set(self._prefilling)
        assert all(row.prefilled == 0 for row in self._waiting.values())
        assert all(row.prefilled == row.prefill_end for row in self._decoding.values())
        for row in self._prefilling.values():
            assert row.prefilled < row.prefill_end
            assert row.prefilled % self._chunk == 0
