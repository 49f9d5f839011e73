"""Segments: files in which the prefixes of prompts outlive a worker.

A segment holds the packed pages of one edge of the prefix tree, from a shorter stored prefix (its
base, or nothing) to its own end, with the tail and the recurrent states at its end. To restore a
prefix, a worker reads the segment that ends there, its base, the base's base, and so on.

Workers write and read the files. The daemon decides what is written and deleted.
"""

from __future__ import annotations

from pathlib import Path

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
    """Key of the segment at whose end this one begins; absent: it begins at the first token."""
    tokens: int
    """Tokens of the whole prefix."""
    nbytes: int
    """Size of the file, or of the content before it is written."""


def segment_path(folder: Path, key: bytes) -> Path:
    """Return the path of a segment's file below the store's folder."""
    name = key.hex()
    return folder / name[:2] / f"{name}{SUFFIX}"
