"""Whose prompt is prefilled next, and with whom.

**Turns.** Rows stand in the line's order. Every second turn is the first's; the turns between are
*express*: they go to the row with the least left to prefill among those of the highest priority
that have at most half of what the first has left, and no lower priority; if there is none, the
first has that turn too.
A long prompt L in front of short ones s and t::

    line       L     L     L     L     L  L  L  L
    express       s     s     t     t                 s and t do not wait for L, nor L for them

Prompts of about one length run one after the other: each is through as early as it can be, and the
second finds the prefix that it shares with the first in the cache.

**Bounds.** The first in line is never passed twice in a row. So a row is through after at most 2 S
groups, S being the chunks of the rows that are in front of it meanwhile, and its own. And a prompt
of s tokens behind one long prompt waits for less than 2 s + 2 C tokens of it: for about as many as
its own while they share the turns, and if they do not, the long one has less than twice as much
left.

**Groups.** Where the engine can, rows whose chunk is their last run in one forward pass with the
one whose turn it is, as far as three things go:

* padding all to the longest fills at most what decoding leaves of the step's budget;
* a quarter of that at most is padding;
* what is dense for a moment, their chunks and the tails in front of them, is no more than a single
  chunk of that size may have. So what is reserved for one prefill holds a group as well.

**Cuts** lie on the absolute grid of C tokens, or at the prompt's end: a chunk attends exactly to
its own keys and to quantized ones before it, so a cut that moved with the load would change the
result.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.scheduling.row import Chunk, Row

SHORT = 2
"""An express row has at most one part in so many of what the first in line has left."""
PADDING = 4
"""At most one token in so many of a group is padding."""
LONGEST_TAIL = 2 * PAGE_TOKENS - 1
"""Tokens in front of a chunk that are not in a page."""


class PrefillOrder:
    """Chooses chunks of ``chunk`` tokens, or groups; ``budget``: tokens of a step."""

    def __init__(self, *, chunk: int, budget: int, group: bool) -> None:
        self._chunk = chunk
        self._budget = budget
        self._group = group
        self._express = False
        """Whether the next turn is an express one."""

    def choose(self, rows: Iterable[Row], decoding: int = 0) -> tuple[Chunk, ...]:
        """Return what runs next, of rows that all have something left; the lead comes first.

        ``decoding``: tokens of the step's budget that are taken already.
        """
        line = sorted(rows, key=lambda row: row.place)
        if not line:
            return ()
        lead = self._lead(line)
        room = self._budget - decoding
        members = self._group_of(lead, line, room) if self._group else [lead]
        return tuple(Chunk(row.rid, row.prefilled, self.cut(row)) for row in members)

    def ran(self) -> None:
        """Note that the chosen ones ran: the next turn is of the other sort."""
        self._express = not self._express

    def cut(self, row: Row) -> int:
        """Return where the row's next chunk ends."""
        return min((row.prefilled // self._chunk + 1) * self._chunk, row.prefill_end)

    def _lead(self, line: list[Row]) -> Row:
        first = line[0]
        if not self._express:
            return first
        short = [
            row for row in line if row.left * SHORT <= first.left and row.priority >= first.priority
        ]
        return min(short, key=lambda row: (-row.priority, row.left, row.place), default=first)

    def _group_of(self, lead: Row, line: list[Row], room: int) -> list[Row]:
        members = [lead]
        if not self._is_last(lead):
            return members
        for row in line:
            if row is not lead and self._is_last(row) and _go_together([*members, row], room):
                members.append(row)
        return members

    def _is_last(self, row: Row) -> bool:
        return self.cut(row) == row.prefill_end


def _go_together(rows: list[Row], room: int) -> bool:
    """Return whether the last chunks of these rows make a group."""
    real = sum(row.left for row in rows)
    padded = len(rows) * max(row.left for row in rows)
    tails = sum(row.prefilled - PAGE_TOKENS * full_pages(row.prefilled) for row in rows)
    fits = padded <= room and tails + real <= room + LONGEST_TAIL
    return fits and (padded - real) * PADDING <= padded
