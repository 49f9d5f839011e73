"""The queue: first come, first served, with priorities that age.

A priority is a head start, counted in tokens of work. Let W be the work of all requests submitted
so far (prompts plus maximum completions). A request of priority p that arrives now gets

    start = W - p * age

The smallest start is served first; equal starts are served in order of arrival. A key never
changes, so nothing is sorted again as requests age. With ``age`` 100::

    W      0        60       120      180                arrival  a   b   c    d
    p=0    a  ------------->  c                          start    0  -40  120  80
    p=1          b ----------------->  d                 served   b, a, d, c

**No starvation.** Consider a request of priority p, and the later arrivals that are served before
it. Let q be their highest priority, and w the work of the last of them to arrive. Their work adds
up to

    less than (q - p) * age + w tokens

for any arrival pattern: the last one overtakes only if the work submitted between our request and
itself is less than (q - p) * age. For q = p no later arrival overtakes: within a priority, requests
are served in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvd.worker.scheduling.request import QueueKey, ScheduledRequest


def _key(request: ScheduledRequest) -> QueueKey:
    return request.queue_key


class RequestQueue:
    """Queued requests in order. ``age``: tokens of later work that one priority step is worth."""

    def __init__(self, age: int) -> None:
        self._age = age
        self._submitted = 0
        self._arrivals = 0
        self._requests: list[ScheduledRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._requests)

    @property
    def head(self) -> ScheduledRequest | None:
        return self._requests[0] if self._requests else None

    def new_key(self, work: int, priority: int) -> QueueKey:
        """Return the key of a request that arrives now; ``work`` is in tokens."""
        key = QueueKey(self._submitted - priority * self._age, self._arrivals)
        self._submitted += work
        self._arrivals += 1
        return key

    def add(self, request: ScheduledRequest) -> None:
        insort(self._requests, request, key=_key)

    def remove(self, request: ScheduledRequest) -> None:
        index = bisect_left(self._requests, request.queue_key, key=_key)
        assert self._requests[index] is request
        del self._requests[index]
