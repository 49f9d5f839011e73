"""The segments of the prefix store, as trees: which depend on which, and which to evict. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet

import msgspec

from actors.machines.eviction_order import Candidate, EvictionOrder
from protocol.segments import KEY_BYTES, SegmentInfo, prefix_value

JUST_USED_S = 10.0
"""Seconds after its last use in which a segment is not evicted: a worker may be reading it."""


class Segment(msgspec.Struct, kw_only=True, gc=False):
    """One stored segment."""

    key: bytes
    space: bytes
    base: bytes | None
    tokens: int
    """Tokens of the whole prefix."""
    nbytes: int
    created: float
    """Seconds since 1970."""
    used: float
    """Seconds since 1970. A base is never older than a segment that continues it."""
    hits: int = 0
    saved_s: float = 0.0
    """Seconds of prefill that its hits saved, less those of reading."""

    @property
    def info(self) -> SegmentInfo:
        return SegmentInfo(key=self.key, base=self.base, tokens=self.tokens, nbytes=self.nbytes)


class SpaceSegments:
    """The segments of one space, and their sums."""

    def __init__(self) -> None:
        self.segments: dict[bytes, Segment] = {}
        self.tokens = 0
        """Tokens whose pages are stored."""
        self.nbytes = 0
        self.hits = 0
        self.saved_s = 0.0
        self.used = 0.0
        """Time of the last use of any segment, also of one that was evicted since then."""


class SegmentIndex:
    """All stored segments. The base of a segment in the index is in the index too.

    No method takes longer with more segments, except `add_all` and `check`.
    """

    def __init__(self) -> None:
        self.segments: dict[bytes, Segment] = {}
        self.spaces: dict[bytes, SpaceSegments] = {}
        """Segments by space."""
        self.nbytes = 0
        """Bytes of all segments."""
        self._order = EvictionOrder(self._candidate)
        self._children: dict[bytes, set[bytes]] = {}
        """Keys of the segments that begin at a segment's end, for those that have any."""

    def __len__(self) -> int:
        return len(self.segments)

    def __contains__(self, key: bytes) -> bool:
        return key in self.segments

    def accepts(self, space: bytes, info: SegmentInfo) -> bool:
        """Return whether a segment is well-formed, and its base is stored in the same space."""
        base = None if info.base is None else self.segments.get(info.base)
        if info.base is not None and (base is None or base.space != space):
            return False
        if base is not None and base.tokens == info.tokens:
            return False
        return len(info.key) == len(space) == KEY_BYTES and info.tokens > 0 and info.nbytes > 0

    def add(self, segment: Segment) -> None:
        """Add a segment that `accepts` accepts; its bases count as used when it was."""
        self.segments[segment.key] = segment
        self.nbytes += segment.nbytes
        if segment.base is not None:
            self._children.setdefault(segment.base, set()).add(segment.key)
            self.touch(segment.base, segment.used)
        space = self.spaces.setdefault(segment.space, SpaceSegments())
        space.segments[segment.key] = segment
        space.used = max(space.used, segment.used)
        self._count(space, segment, 1)
        self._order.add(segment.key)

    def add_all(self, segments: Iterable[Segment]) -> list[Segment]:
        """Add segments in any order; return those without a usable base, which are not added."""
        left = list(segments)
        while left:
            rejected = []
            for segment in left:
                if segment.key not in self and self.accepts(segment.space, segment.info):
                    self.add(segment)
                else:
                    rejected.append(segment)
            if len(rejected) == len(left):
                break
            left = rejected  # the base of some may be there now
        return left

    def remove(self, key: bytes) -> Segment:
        """Remove a segment on which no other depends."""
        assert key not in self._children, "removes a base of another segment"
        segment = self.segments[key]
        space = self.spaces[segment.space]
        self._count(space, segment, -1)
        del self.segments[key], space.segments[key]
        if not space.segments:
            del self.spaces[segment.space]
        self.nbytes -= segment.nbytes
        if segment.base is not None:
            siblings = self._children[segment.base]
            siblings.discard(key)
            if not siblings:
                del self._children[segment.base]
                self._order.add(segment.base)
        return segment

    def _count(self, space: SpaceSegments, segment: Segment, sign: int) -> None:
        space.tokens += sign * self.tokens_of(segment)
        space.nbytes += sign * segment.nbytes
        space.hits += sign * segment.hits
        space.saved_s += sign * segment.saved_s

    def keys_in(self, space: bytes) -> AbstractSet[bytes]:
        """Return the keys of the segments of a space."""
        found = self.spaces.get(space)
        return set() if found is None else found.segments.keys()

    def path(self, key: bytes | None) -> Iterator[Segment]:
        """Yield a segment, its base, the base's base, and so on."""
        while key is not None:
            segment = self.segments[key]
            yield segment
            key = segment.base

    def touch(self, key: bytes, now: float) -> list[Segment]:
        """Mark a segment and its bases as used; return them."""
        found = list(self.path(key))
        for segment in found:
            segment.used = max(segment.used, now)
        return found

    def hit(self, key: bytes, saved_s: float, now: float) -> list[Segment]:
        """Count a hit of a segment; return the segments that were used for it."""
        segment = self.segments[key]
        space = self.spaces[segment.space]
        for counted in (segment, space):
            counted.hits += 1
            counted.saved_s += saved_s
        space.used = max(space.used, now)
        return self.touch(key, now)

    def tokens_of(self, segment: Segment) -> int:
        """Return the tokens beyond a segment's base; 0 if the base is longer."""
        above = 0 if segment.base is None else self.segments[segment.base].tokens
        return max(0, segment.tokens - above)

    def with_dependents(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return these keys and all that depend on them, each before its base."""
        found: dict[bytes, None] = {}
        waiting = [key for key in keys if key in self]
        while waiting:
            key = waiting.pop()
            found.pop(key, None)
            found[key] = None  # after its base
            waiting += self._children.get(key, ())
        return list(reversed(found))

    def evict(
        self, nbytes: int, now: float, kept: Collection[bytes | None] = (), limit: int | None = None
    ) -> list[Segment]:
        """Remove the least valuable segments that together have ``nbytes``, each before its base.

        Excludes the keys in ``kept``, their bases, and segments that were just used; returns fewer
        bytes if no others are left, and at most ``limit`` segments.
        """
        evicted: list[Segment] = []
        skipped = []
        while nbytes > 0 and len(evicted) != limit:
            if (key := self._order.pop(now, JUST_USED_S)) is None:
                break
            if key in kept:
                skipped.append(key)
            else:
                evicted.append(self.remove(key))
                nbytes -= evicted[-1].nbytes
        for key in skipped:
            self._order.add(key)
        return evicted

    def restore(self, evicted: Iterable[Segment]) -> None:
        """Undo `evict`."""
        for segment in reversed(list(evicted)):
            self.add(segment)

    def _candidate(self, key: bytes) -> Candidate | None:
        """Return a segment's worth and last use, if no other depends on it."""
        segment = self.segments.get(key)
        if segment is None or key in self._children:
            return None
        saved, nbytes = self.tokens_of(segment), segment.nbytes
        if segment.base is not None and not saved:
            # It keeps its longer base, of whose pages it uses the first.
            base = self.segments[segment.base]
            saved, nbytes = segment.tokens, nbytes + base.nbytes * segment.tokens // base.tokens
        return Candidate(prefix_value(saved, nbytes, 0.0), segment.used)

    def check(self) -> None:
        assert self.nbytes == sum(it.nbytes for it in self.segments.values()), "wrong sum of bytes"
        for key, segment in self.segments.items():
            assert segment.key == key, "a segment under the key of another"
            if segment.base is not None:
                assert segment.base in self.segments, "a segment without its base"
                assert key in self._children[segment.base], "a base does not know its segment"
                assert self.segments[segment.base].used >= segment.used, "a base is older"
        for name, space in self.spaces.items():
            found = space.segments.values()
            assert space.segments, "a space without a segment"
            assert all(self.segments[it.key] is it and it.space == name for it in found), "strays"
            sums = (space.tokens, space.nbytes, space.hits)
            assert sums == (
                sum(map(self.tokens_of, found)),
                sum(it.nbytes for it in found),
                sum(it.hits for it in found),
            ), "wrong sums of a space"
        assert sum(len(it.segments) for it in self.spaces.values()) == len(self), "one is missing"
        edges = sum(it.base is not None for it in self.segments.values())
        assert edges == sum(map(len, self._children.values())), "an edge without a segment"
