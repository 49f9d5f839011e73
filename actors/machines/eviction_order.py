"""In which order segments are evicted. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

GROUPS_PER_OCTAVE = 4


class Candidate(NamedTuple):
    """A segment that may be evicted."""

    worth: float
    """Its value while it is in use. It never changes."""
    used: float
    """Seconds since 1970."""


class EvictionOrder:
    """Segments in groups of nearly equal worth: in each, the one that is unused longest goes first.

    A segment's value is its worth / (1 + seconds since its last use), so the order of all changes
    with time, but hardly the one within a group. The best of the groups' first segments has at most
    2 ** (1 / `GROUPS_PER_OCTAVE`) times the least value of all. There are some dozens of groups, so
    finding it takes microseconds with any number of segments.

    ``find`` returns the present state of a segment, or None if it may not be evicted. Later uses
    and removals need not be reported: an outdated entry is corrected when it is first in its group.
    """

    def __init__(self, find: Callable[[bytes], Candidate | None]) -> None:
        self._find = find
        self._groups: dict[int, list[tuple[float, bytes]]] = {}
        """Heaps of the time of the last use and the key."""
        self._listed: set[bytes] = set()
        """Keys with an entry: one at most for each segment."""

    def add(self, key: bytes) -> None:
        """Add a segment that may be evicted from now on."""
        if key not in self._listed and (found := self._find(key)) is not None:
            self._listed.add(key)
            heap = self._groups.setdefault(_group(found.worth), [])
            heapq.heappush(heap, (found.used, key))

    def pop(self, now: float, unused_s: float) -> bytes | None:
        """Take the least valuable segment that was not used in the last ``unused_s``, if any."""
        least = math.inf
        chosen = None
        for group in list(self._groups):
            if (first := self._first(group)) is None:
                continue
            age = now - first.used
            if age >= unused_s and (value := first.worth / (1 + age)) < least:
                least, chosen = value, group
        if chosen is None:
            return None
        _, key = heapq.heappop(self._groups[chosen])
        self._listed.discard(key)
        return key

    def _first(self, group: int) -> Candidate | None:
        """Return the first segment of a group, after its outdated entries are corrected."""
        heap = self._groups[group]
        while heap:
            used, key = heap[0]
            found = self._find(key)
            if found is not None and found.used == used and _group(found.worth) == group:
                return found
            heapq.heappop(heap)
            self._listed.discard(key)
            self.add(key)
        del self._groups[group]
        return None


def _group(worth: float) -> int:
    return math.floor(GROUPS_PER_OCTAVE * math.log2(worth))
