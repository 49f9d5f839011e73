"""The queue: first come, first served, with priorities that age.

A priority is a head start, counted in tokens of work. A request of priority p that arrives when
requests of W tokens (prompts and what they may generate) have been submitted stands at

    start = W - p * age

and the smallest start is served first, of equal ones the earlier. A place never changes, so nothing
has to be sorted anew as requests grow old; with ``age`` 100::

    W      0        60       120      180                arrival  a   b   c    d
    p=0    a  ------------->  c                          start    0  -40  120  80
    p=1          b ----------------->  d                 served   b, a, d, c

**Nobody starves.** For a request of priority p, let q be the highest priority of the requests that
arrive later and are served before it, and w the work of the last of these. Then they bring

    less than (q - p) * age + w tokens

between them, however they arrive and however long it takes: the last of them stands in front only
if all that was submitted after our request and before it is less than (q - p) * age. With q = p
that is none at all: within a priority the order is that of arrival.

Does not cover: whether the first one fits (`kvd.worker.scheduling.admission`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvd.worker.scheduling.row import Place, Row


def _place(row: Row) -> Place:
    return row.place


class Line:
    """Requests that wait. ``age``: tokens of later work that one step of priority is worth."""

    def __init__(self, age: int) -> None:
        self._age = age
        self._submitted = 0
        self._arrivals = 0
        self._rows: list[Row] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @property
    def head(self) -> Row | None:
        """The request that is served next."""
        return self._rows[0] if self._rows else None

    def arrive(self, work: int, priority: int) -> Place:
        """Return the place of a request that arrives now; ``work`` in tokens."""
        place = Place(self._submitted - priority * self._age, self._arrivals)
        self._submitted += work
        self._arrivals += 1
        return place

    def join(self, row: Row) -> None:
        """Let a request wait at its place, which may be in front."""
        insort(self._rows, row, key=_place)

    def leave(self, row: Row) -> None:
        """Take a request out."""
        index = bisect_left(self._rows, row.place, key=_place)
        assert self._rows[index] is row
        del self._rows[index]
