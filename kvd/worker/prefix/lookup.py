"""Explains a lookup in the prefix cache: why each part of a prompt was found or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvd.worker.prefix.queued_paths import edge_of
from protocol.cache_outcome import (
    CacheOutcome,
    CachePart,
    CacheReason,
    Difference,
    Eviction,
    UnreadCause,
)

_TOKEN_BYTES = len(edge_of([0]))


@dataclass(frozen=True)
class Nearest:
    """The cached prompt with the longest common beginning, as far as the tree knows its tokens."""

    tokens: int
    """Tokens that both have."""
    rest: Sequence[int] = ()
    """Next tokens of the cached prompt, up to the end of the chunk; empty: one of the two ends."""


@dataclass(frozen=True)
class Unread:
    """A stored beginning of the prompt that was not read."""

    tokens: int
    cause: UnreadCause


@dataclass(frozen=True)
class Lookup:
    """Facts about a prompt when its prefill begins."""

    prompt_tokens: int
    chunk: int = 0
    memory: int = 0
    """Tokens of the checkpoint to continue from."""
    nearest: Nearest = field(default_factory=lambda: Nearest(0))
    evicted: Eviction | None = None
    all_for: CacheReason | None = None
    """The reason for all tokens, if the prompt was not looked up."""

    def outcome(self, held: int, unread: Unread | None) -> CacheOutcome:
        """Return the outcome. ``held``: tokens from memory and disk when prefill begins."""
        total, nearest = self.prompt_tokens, self.nearest
        if self.all_for is not None:
            return CacheOutcome(parts=[CachePart(self.all_for, total)], chunk=self.chunk)
        stored = 0 if unread is None else unread.tokens
        dropped = 0 if self.evicted is None else self.evicted.tokens
        ends: list[tuple[CacheReason, int]] = [
            ("memory", self.memory),
            ("disk", held),
            ("unread", stored),
            ("evicted", dropped),
            ("between", nearest.tokens),
            (self._last_reason(max(held, stored, dropped)), total),
        ]
        parts, start = [], 0
        for reason, end in ends:
            if end > start:
                parts.append(CachePart(reason, end - start))
                start = end
        reasons = {part.reason for part in parts}
        return CacheOutcome(
            parts=parts,
            chunk=self.chunk,
            difference=Difference(nearest.tokens) if "differs" in reasons else None,
            eviction=self.evicted if "evicted" in reasons else None,
            unread=unread.cause if unread is not None and "unread" in reasons else None,
        )

    def _last_reason(self, known: int) -> CacheReason:
        """Return the reason of a prompt's last tokens. ``known``: tokens that were ever cached."""
        common = self.nearest.tokens
        if common and known <= common and self.nearest.rest:
            return "differs"
        if self.chunk and max(known, common) >= (self.prompt_tokens - 1) // self.chunk * self.chunk:
            return "end"
        return "new" if known or common else "empty"


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many leading tokens two edges have in common."""
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        end, start = middle * _TOKEN_BYTES, low * _TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
