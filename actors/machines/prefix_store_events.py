"""Events and commands of the prefix store (`actors.machines.prefix_store`)."""

from __future__ import annotations

from typing import Literal

from actors.machines.machine import Record
from actors.machines.segment_index import Segment, SegmentIndex
from protocol.worker import SegmentCommand, SegmentReport


class StoreLimits(Record, frozen=True):
    """The settings of the prefix store."""

    limit_bytes: int = 0
    """Maximum bytes of all segments; 0: the store is off."""
    daily_bytes: int = 50 * 10**9
    """Maximum bytes written in a day (UTC)."""
    keep_free_bytes: int = 5 * 10**9
    """Free bytes of the file system that the store leaves to others."""


Refusal = Literal["off", "stored", "busy", "invalid", "limit", "keep_free", "daily_writes"]
"""Why a segment may not be written: the store is off; it is stored; it is being written or deleted,
or too many others are; its base is missing; it is larger than what could be evicted; the disk is
full; the daily writes are used up, or kept for prefixes that were used again."""

# -- events -----------------------------------------------------------------------------------


class Reported(Record, frozen=True):
    """A worker's process sent a report about segments."""

    model: str
    life: int
    """Number of the process."""
    report: SegmentReport
    draining: bool = False
    """Whether the process is about to end."""


class WorkerExited(Record, frozen=True):
    """A worker's process has ended."""

    life: int


class LimitsChanged(Record, frozen=True):
    """New settings; also starts the store."""

    limits: StoreLimits


class DropRequested(Record, frozen=True):
    """A client wants segments deleted: those that match all conditions that are set."""

    ticket: int
    model: str | None = None
    unused_s: float | None = None
    """Seconds since the last use."""


class AlarmFired(Record, frozen=True):
    """A few seconds have passed."""


class Continued(Record, frozen=True):
    """Answers `Continue`."""

    life: int


class StoreOpened(Record, frozen=True):
    """Answers `OpenStore`: what the folder contains, except the segments that are being written."""

    seq: int
    index: SegmentIndex
    written: dict[int, int]
    """Bytes written by day, in days since 1970."""
    models: dict[bytes, list[str]]
    """Names of the models that used a space."""
    damaged: list[str]
    """Reason for the deletion of each damaged file."""


class RoomMade(Record, frozen=True):
    """Answers `MakeRoom`: the segments to evict are deleted."""

    key: bytes
    evicted: list[bytes]
    free_bytes: int
    """Free bytes of the file system."""


class SegmentsDeleted(Record, frozen=True):
    """Answers `DeleteSegments`."""

    keys: list[bytes]
    ticket: int | None = None


class Settled(Record, frozen=True):
    """Answers `Settle`: the segments among these that are complete; all other files are deleted."""

    keys: list[bytes]
    found: list[Segment]


class FreeBytesRead(Record, frozen=True):
    """Answers `Synchronize`."""

    free_bytes: int


class DiskFailed(Record, frozen=True):
    """Any disk command failed. Commands after it may fail too, or succeed."""

    reason: str


DiskEvent = StoreOpened | RoomMade | SegmentsDeleted | Settled | FreeBytesRead | DiskFailed
Event = Reported | WorkerExited | LimitsChanged | DropRequested | AlarmFired | Continued | DiskEvent

# -- commands ---------------------------------------------------------------------------------


class SendToWorker(Record, frozen=True):
    """Send a command to the process with this number."""

    life: int
    command: SegmentCommand


class Continue(Record, frozen=True):
    """List more segments for a process after other work. Answered by `Continued`."""

    life: int


class Refused(Record, frozen=True):
    """Count a refused segment; its worker is answered by `SendToWorker`."""

    model: str
    reason: Refusal


class Announce(Record, frozen=True):
    """Record that the store was turned on, or off because of a fault, or found damaged files."""

    kind: Literal["prefix_store_on", "prefix_store_off", "segment_damaged"]
    reason: str


class Dropped(Record, frozen=True):
    """Answer `DropRequested`; `failed`: the disk failed, so some files may be left."""

    ticket: int
    segments: int = 0
    nbytes: int = 0
    failed: bool = False


class OpenStore(Record, frozen=True):
    """Read the index, and make it agree with the files.

    Deletes incomplete files, except those of the keys in `writing`, and segments without a base.
    Answered by `StoreOpened`.
    """

    seq: int
    writing: frozenset[bytes]
    now: float
    """No use can be later. The clock may have been set back."""


class MakeRoom(Record, frozen=True):
    """Prepare the folder for the file of `key`, and delete other segments for it."""

    key: bytes
    evicted: list[bytes]


class DeleteSegments(Record, frozen=True):
    """Delete segments, in this order."""

    keys: list[bytes]
    ticket: int | None = None


class Settle(Record, frozen=True):
    """Find out what a worker that ended has left of the segments that it was writing."""

    keys: list[bytes]


class RecordWritten(Record, frozen=True):
    """Record bytes that were written on a day, and the segment if it is complete."""

    day: int
    nbytes: int
    segment: Segment | None = None


class RecordModel(Record, frozen=True):
    """Record the name of a model that uses a space."""

    space: bytes
    model: str


class Synchronize(Record, frozen=True):
    """Record when and how often segments were used, and read the free bytes of the file system."""

    used: list[Segment]
    """Copies, because another thread reads them."""


DiskCommand = (
    OpenStore | MakeRoom | DeleteSegments | Settle | RecordWritten | RecordModel | Synchronize
)
"""Commands for the disk, which runs them one after the other."""
Command = SendToWorker | Continue | Refused | Announce | Dropped | DiskCommand
