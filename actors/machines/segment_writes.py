"""Which segments workers are writing, and how much was written on each day. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from protocol.segments import SegmentInfo

DAY_S = 86_400
FRAMES_BYTES = 64 * 1024


class Permission(msgspec.Struct):
    """A worker's permission to write one segment."""

    life: int
    space: bytes
    segment: SegmentInfo
    allowed: bool = False
    """Whether `SegmentAllowed` was sent; before, segments are deleted for it."""
    revoked: bool = False
    """The segment is deleted once it is written."""

    @property
    def nbytes(self) -> int:
        """Bytes that the file may have: those that were offered, and the frames of its records."""
        return self.segment.nbytes + self.segment.nbytes // 32 + FRAMES_BYTES


class SegmentWrites:
    """The permissions by key, and the bytes written by day."""

    def __init__(self) -> None:
        self.permissions: dict[bytes, Permission] = {}
        self.days: dict[int, int] = {}
        """Bytes written by day, in days since 1970."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all permissions."""
        return sum(it.nbytes for it in self.permissions.values())

    @property
    def allowed_bytes(self) -> int:
        """Bytes that workers may be writing now."""
        return sum(it.nbytes for it in self.permissions.values() if it.allowed)

    @property
    def bases(self) -> set[bytes | None]:
        """The bases of the segments that are being written."""
        return {it.segment.base for it in self.permissions.values()}

    def take(self, life: int, key: bytes) -> Permission | None:
        """Remove and return the permission of a process to write a segment now, if it has one."""
        found = self.permissions.get(key)
        if found is None or not found.allowed or found.life != life:
            return None
        return self.permissions.pop(key)

    def take_waiting(self, lives: Iterable[int] | None = None) -> dict[bytes, Permission]:
        """Remove and return the permissions that were not sent; None: of all processes."""
        kept = None if lives is None else set(lives)
        found = {
            key: it
            for key, it in self.permissions.items()
            if not it.allowed and (kept is None or it.life in kept)
        }
        for key in found:
            del self.permissions[key]
        return found

    def keys_of(self, life: int) -> list[bytes]:
        return [key for key, it in self.permissions.items() if it.life == life]

    def today(self, now: float) -> int:
        """Return the bytes written today."""
        return self.days.get(int(now // DAY_S), 0)

    def count(self, nbytes: int, now: float) -> int:
        """Count bytes as written today; return the day."""
        day = int(now // DAY_S)
        self.days[day] = self.days.get(day, 0) + nbytes
        return day
