"""The segments of one space, as a worker knows them, and which checkpoints are worth a segment.

The index is a copy of the daemon's, for lookups without a message. It may be stale: a segment
whose file is gone is a miss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from protocol.segments import KEY_BYTES, SegmentInfo

MIN_TOKENS = 512
"""Tokens that a segment adds at least. A shorter one costs more for its tail than it saves."""
MIN_PART = 20
"""A segment adds at least this part of its prefix, 1 / `MIN_PART`: a conversation that grows by
short messages does not write a tail for each."""
MIN_SECONDS = 0.25
"""Seconds of prefill that a prefix must take to be worth a file."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint of the prefix tree."""

    names: Sequence[bytes]
    """`kvd.worker.prefix.queued_paths.Path` up to the checkpoint, which the last name is for."""
    tokens: int
    hits: int
    longer: Sequence[bytes]
    """Names of the checkpoints that continue it."""
    snapshot: Any


class SegmentIndex:
    """The segments of one space, and the keys that name prefixes in it.

    ``secret``: with it, keys cannot be computed from prompts without it.
    """

    def __init__(self, space: bytes, chunk: int, secret: bytes = b"") -> None:
        self._space = space
        self._secret = secret
        self._chunk = chunk
        self._segments: dict[bytes, SegmentInfo] = {}
        self._lengths: Counter[int] = Counter()
        """Number of segments by tokens. Names at other lengths need no digest: with 64 checkpoints
        of 32K tokens, a search takes 0.4 ms instead of 11 ms."""
        self.changes = 0
        """How often `change` was called."""

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, key: bytes) -> bool:
        return key in self._segments

    def change(self, added: Iterable[SegmentInfo], removed: Iterable[bytes]) -> None:
        self.changes += 1
        for key in removed:
            self._remove(key)
        for segment in added:
            self._remove(segment.key)
            self._segments[segment.key] = segment
            self._lengths[segment.tokens] += 1

    def _remove(self, key: bytes) -> None:
        if (segment := self._segments.pop(key, None)) is not None:
            self._lengths[segment.tokens] -= 1
            if not self._lengths[segment.tokens]:
                del self._lengths[segment.tokens]

    def key(self, name: bytes) -> bytes:
        """Return the key of the prefix with this name."""
        return blake2b(self._space + name, key=self._secret, digest_size=KEY_BYTES).digest()

    def find(self, names: Sequence[bytes], above: int = 0) -> list[SegmentInfo]:
        """Return the segments of the longest stored beginning of a prompt, the last one first.

        Empty unless that beginning has more than ``above`` tokens.
        """
        lengths = {tokens // self._chunk for tokens in self._lengths}
        possible = lengths.intersection(range(above // self._chunk + 1, len(names) + 1))
        for chunks in sorted(possible, reverse=True):
            if found := self._chain(self.key(names[chunks - 1])):
                return found
        return []

    def _chain(self, key: bytes | None) -> list[SegmentInfo]:
        """Return a segment and its bases; empty if one of them is missing."""
        found: list[SegmentInfo] = []
        while key is not None:
            segment = self._segments.get(key)
            if segment is None or segment in found:
                return []
            found.append(segment)
            key = segment.base
        return found

    def to_write(
        self, checkpoints: Iterable[Checkpoint], tokens_per_s: float
    ) -> Iterator[tuple[Checkpoint, SegmentInfo | None]]:
        """Yield the checkpoints that are worth a segment, the best first, each with its base.

        The best one saves most prefill, and more for each prompt that continued from it. A
        checkpoint on the way to a longer one counts only if a prompt continued from it. Its base
        may be the longer one, which has its pages.
        """
        found = []
        for checkpoint in checkpoints:
            if self.key(checkpoint.names[-1]) in self._segments:
                continue
            base = self._longer(checkpoint) or next(iter(self.find(checkpoint.names)), None)
            added = checkpoint.tokens
            if base is not None and base.tokens < added:
                added -= base.tokens
            worth = (checkpoint.hits or not checkpoint.longer) and added >= max(
                MIN_TOKENS, checkpoint.tokens // MIN_PART
            )
            if worth and checkpoint.tokens >= MIN_SECONDS * tokens_per_s:
                found.append((added * (1 + checkpoint.hits), checkpoint, base))
        found.sort(key=lambda one: one[0], reverse=True)
        for _, checkpoint, base in found:
            yield checkpoint, base

    def _longer(self, checkpoint: Checkpoint) -> SegmentInfo | None:
        """Return a stored segment that continues a checkpoint."""
        for name in checkpoint.longer:
            if found := self._chain(self.key(name)):
                return found[0]
        return None
