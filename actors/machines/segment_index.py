"""The segments of the prefix store, as trees: which depend on which, and which to evict. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator

import msgspec

from protocol.segments import KEY_BYTES, SegmentInfo, prefix_value

JUST_USED_S = 10.0
"""Seconds after its last use in which a segment is not evicted: a worker may be reading it."""


class Segment(msgspec.Struct, kw_only=True):
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


class SegmentIndex:
    """All stored segments. The base of a segment in the index is in the index too."""

    def __init__(self) -> None:
        self.segments: dict[bytes, Segment] = {}
        self.nbytes = 0
        """Bytes of all segments."""
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
        segment = self.segments.pop(key)
        self.nbytes -= segment.nbytes
        if segment.base is not None:
            siblings = self._children[segment.base]
            siblings.discard(key)
            if not siblings:
                del self._children[segment.base]
        return segment

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

    def choose(self, nbytes: int, now: float, kept: Collection[bytes | None] = ()) -> list[bytes]:
        """Return the least valuable segments that together have ``nbytes``, each before its base.

        Excludes the keys in ``kept``, their bases, and segments that were just used; returns fewer
        bytes if no others are left. Nothing is removed.
        """
        if nbytes <= 0:
            return []
        children = {key: len(found) for key, found in self._children.items()}
        leaves = [
            (self._value(segment, now), key)
            for key, segment in self.segments.items()
            if key not in children and self._is_evictable(segment, now, kept)
        ]
        heapq.heapify(leaves)
        chosen: list[bytes] = []
        while leaves and nbytes > 0:
            _, key = heapq.heappop(leaves)
            segment = self.segments[key]
            chosen.append(key)
            nbytes -= segment.nbytes
            if segment.base is None:
                continue
            children[segment.base] -= 1
            base = self.segments[segment.base]
            if not children[segment.base] and self._is_evictable(base, now, kept):
                heapq.heappush(leaves, (self._value(base, now), base.key))
        return chosen

    def _is_evictable(self, segment: Segment, now: float, kept: Collection[bytes | None]) -> bool:
        return segment.key not in kept and not 0 <= now - segment.used < JUST_USED_S

    def _value(self, segment: Segment, now: float) -> float:
        age_s = max(0.0, now - segment.used)
        saved, nbytes = self.tokens_of(segment), segment.nbytes
        if segment.base is not None and not saved:
            # It keeps its longer base, of whose pages it uses the first.
            base = self.segments[segment.base]
            saved, nbytes = segment.tokens, nbytes + base.nbytes * segment.tokens // base.tokens
        return prefix_value(saved, nbytes, age_s)

    def check(self) -> None:
        assert self.nbytes == sum(it.nbytes for it in self.segments.values()), "wrong sum of bytes"
        for key, segment in self.segments.items():
            assert segment.key == key, "a segment under the key of another"
            if segment.base is not None:
                assert segment.base in self.segments, "a segment without its base"
                assert key in self._children[segment.base], "a base does not know its segment"
                assert self.segments[segment.base].used >= segment.used, "a base is older"
        edges = sum(it.base is not None for it in self.segments.values())
        assert edges == sum(map(len, self._children.values())), "an edge without a segment"
