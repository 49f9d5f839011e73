"""Segments: files in which the prefixes of prompts outlive a worker.

A segment holds the packed pages of one edge of the prefix tree, from a shorter stored prefix (its
base, or nothing) to its own end, with the tail and the recurrent states at its end. To restore a
prefix, a worker reads the segment that ends there, its base, the base's base, and so on. A base may
also be longer: then the segment's pages are among those of the base, and it holds only the rest.

Workers write and read the files. The daemon decides what is written and deleted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

SUFFIX = ".kvs"
PART_SUFFIX = ".part"
"""Suffix of a file that is not complete."""
KEY_BYTES = 16


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One segment, as the index knows it."""

    key: bytes
    """`KEY_BYTES` that name the prefix: a digest of the space, the salt and all tokens."""
    base: bytes | None = None
    """Key of the segment that has the pages which this one lacks; absent: it lacks none."""
    tokens: int
    """Tokens of the whole prefix."""
    nbytes: int
    """Size of the file. Before it is written, the size of its contents: the file may be larger by a
    32nd and 64 KiB, and a larger one is deleted."""


def segment_path(folder: Path, key: bytes) -> Path:
    """Return the path of a segment's file below the store's folder."""
    name = key.hex()
    return folder / name[:2] / f"{name}{SUFFIX}"


def prefix_value(tokens_saved: int, nbytes: int, age: float) -> float:
    """Return how much a stored prefix is worth; the least valuable one is evicted first.

    ``tokens_saved`` are those beyond the next shorter stored prefix, from which hits would continue
    instead. ``nbytes`` are those that dropping it frees. ``age`` is the time since its last use, or
    the number of queries since then: the longer a prefix is unused, the less often it is used again
    (hyperbolic caching, Blankstein et al., USENIX ATC 2017).
    """
    return tokens_saved / (max(1, nbytes) * (1 + age))


class PrefixSpace(msgspec.Struct, kw_only=True):
    """The stored segments of one space, which models of the same weights share."""

    models: list[str]
    """Names of the models that have used the space."""
    segments: int = 0
    tokens: int = 0
    """Tokens whose pages are stored."""
    nbytes: int = 0
    hits: int = 0
    """How often a prompt continued from one of these segments."""
    saved_s: float = 0.0
    """Seconds of prefill that the hits saved, less those of reading."""
    used: float = 0.0
    """When a segment was last written or used, in seconds since 1970."""


class PrefixStoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The prefix store and its limits."""

    state: Literal["off", "opening", "on"]
    fault: str | None = None
    """Why the store is off although it is configured."""
    encrypted: bool = False
    """Whether segments are encrypted."""
    limit_bytes: int
    """Maximum bytes of all segments; 0: the store is off."""
    daily_bytes: int
    """Maximum bytes written in a day (UTC)."""
    keep_free_bytes: int
    """Free bytes of the file system that the store leaves to others."""
    segments: int
    """Number of segments."""
    stored_bytes: int
    """Bytes of all segments, those that are being written or deleted included."""
    written_today_bytes: int
    written_bytes: int
    """Bytes written since the store was created."""
    evicted_segments: int = 0
    """Segments that were deleted for others since the daemon's start."""
