"""Which segments of prefixes are stored on disk: the permissions to write, and eviction. Pure.

A worker offers a segment and writes it when it is allowed. From the permission until the segment is
written or abandoned, or the worker's exit is settled, its bytes are reserved. Segments that are
evicted for it are deleted before the worker gets the permission. The bytes of stored segments, of
those being deleted and of those being written therefore never exceed the limit, except after the
limit was lowered.

All times are seconds since 1970, because uses are remembered across restarts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from msgspec.structs import replace

from actors.machines import prefix_store_events as ev
from actors.machines.segment_index import Segment, SegmentIndex
from actors.machines.segment_readers import Reader, SegmentReaders
from actors.machines.segment_writes import Permission, SegmentWrites
from protocol import worker as wire

CHECK_S = 60.0
"""Seconds between readings of the free bytes, and between attempts to open a failed store."""
MAX_PERMISSIONS = 64
"""Segments that may be written at once, so that a hanging disk does not collect many."""
MAX_DELETED = 128
"""Segments that are deleted at once, except for a new one: some milliseconds of work."""


@dataclass
class _Drop:
    """A `DropRequested` that is carried out in parts."""

    keys: list[bytes]
    """Keys that are still to be deleted."""
    segments: int = 0
    nbytes: int = 0


class PrefixStore:
    """The state machine of the prefix store. Off until `LimitsChanged` with a limit."""

    def __init__(self) -> None:
        self.limits = ev.StoreLimits()
        self.state: Literal["off", "opening", "on"] = "off"
        self.fault: str | None = None
        """Why the store is off although it is configured."""
        self.index = SegmentIndex()
        """Segments that workers know of, in every state."""
        self.readers = SegmentReaders()
        self.writes = SegmentWrites()
        self._damaged: set[bytes] = set()
        """Segments that were reported as damaged while the store was not on."""
        self.deleting: dict[bytes, int] = {}
        """Bytes of segments that are out of the index and may still have a file."""
        self._synchronizing = False
        self._unrecorded: set[bytes] = set()
        """Segments whose last use is not on disk."""
        self.evicted = 0
        """Segments evicted since the start."""
        self._drops: dict[int, _Drop] = {}
        """Drops that are carried out, by ticket."""
        self._held: list[ev.Event] = []
        """Events that wait until the store is open."""
        self._checked_at = 0.0
        self._latest = 0.0
        """Latest time of any event; the clock may be set back."""
        self._opens = 0
        """Number of the last `OpenStore`; answers to earlier ones are ignored."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        self._latest = max(self._latest, now)
        if self.state == "opening" and self._must_wait(event):
            self._held.append(event)
            return []
        return list(self._handle(event, now))

    def _must_wait(self, event: ev.Event) -> bool:
        """Return whether an event changes files that are being scanned."""
        match event:
            case ev.Reported(report=wire.SegmentWritten() | wire.SegmentAbandoned()):
                return True
            case ev.WorkerExited() | ev.DropRequested():
                return True
            case _:
                return False

    def _handle(self, event: ev.Event, now: float) -> Iterator[ev.Command]:  # noqa: C901, PLR0912 - one match
        match event:
            case ev.Reported():
                yield from self._reported(event, now)
            case ev.WorkerExited(life=life):
                yield from self._exited(life)
            case ev.LimitsChanged(limits=limits):
                yield from self._change(limits, now)
            case ev.DropRequested():
                yield from self._drop(event, now)
            case ev.AlarmFired():
                yield from self._check_time(now)
            case ev.StoreOpened():
                yield from self._opened(event, now)
            case ev.DiskFailed(reason=reason):
                yield from self._fail(reason, now)
            case ev.Continued(life=life):
                yield from self.readers.list_next(life, self.index.segments)
            case _ if self.state != "on":
                pass  # the store failed in the meantime, and the next scan finds what is left
            case ev.RoomMade():
                yield from self._room_made(event, now)
            case ev.SegmentsDeleted(keys=keys, ticket=ticket):
                self._forget(keys)
                if ticket is not None and ticket in self._drops:
                    yield from self._drop_next(ticket)
                else:
                    yield from self._fit(now)
            case ev.Settled():
                yield from self._settled(event, now)
            case ev.FreeBytesRead(free_bytes=free):
                self._synchronizing = False
                yield from self._free(self.limits.keep_free_bytes - free, now)
                yield from self._fit(now)
            case _:
                assert_never(event)

    @property
    def stored_bytes(self) -> int:
        """Bytes of files that exist or that a worker may write now."""
        return self.index.nbytes + sum(self.deleting.values()) + self.writes.allowed_bytes

    def check(self) -> None:
        self.index.check()
        permissions = self.writes.permissions
        assert not self.index.segments.keys() & permissions.keys(), "writes a stored segment"
        assert not self.index.segments.keys() & self.deleting.keys(), "deletes a stored segment"
        lives = {it.life for it in permissions.values() if not it.allowed}
        assert lives <= self.readers.workers.keys(), "prepares a segment for a process that ended"
        assert self._held == [] or self.state == "opening", "events wait although the store is open"

    # -- on and off -------------------------------------------------------------------------------

    def _change(self, limits: ev.StoreLimits, now: float) -> Iterator[ev.Command]:
        self.limits = limits
        if not limits.limit_bytes:
            yield from self._close()
        elif self.state == "off":
            yield from self._open(now)
        elif self.state == "on":
            yield from self._fit(now)

    def _open(self, now: float) -> Iterator[ev.Command]:
        self.state, self._checked_at = "opening", now
        self._opens += 1
        self._synchronizing = False
        self.deleting.clear()
        yield ev.OpenStore(self._opens, frozenset(self.writes.permissions), now)

    def _opened(self, event: ev.StoreOpened, now: float) -> Iterator[ev.Command]:
        if self.state != "opening" or event.seq != self._opens:
            return  # turned off in the meantime
        before, self.index = self.index, event.index
        self.writes.days = dict(event.written)
        self.state, self.fault = "on", None
        yield ev.Announce("prefix_store_on", f"{len(self.index)} segments are stored")
        if event.damaged:
            text = f"{len(event.damaged)} damaged files are deleted: {event.damaged[0]}"
            yield ev.Announce("segment_damaged", text)
        yield from self._delete_damaged()
        yield from self.readers.replace_index(before, self.index, opened=True)
        for space, model in self.readers.add_models(event.models):
            yield ev.RecordModel(space, model)
        yield from self._fit(now)
        held, self._held = self._held, []
        for one in held:
            yield from self._handle(one, now)

    def _close(self) -> Iterator[ev.Command]:
        """Turn the store off; its files stay."""
        before, self.index = self.index, SegmentIndex()
        self.fault = None
        yield from self._leave()
        yield from self.readers.replace_index(before, self.index)

    def _fail(self, reason: str, now: float) -> Iterator[ev.Command]:
        """Turn the store off until the disk works again; workers may still read its files."""
        if self.state == "off":
            return
        self.fault, self._checked_at = reason, now
        yield from self._leave()
        yield ev.Announce("prefix_store_off", reason)

    def _leave(self) -> Iterator[ev.Command]:
        self.state = "off"
        self._unrecorded.clear()
        yield from self.refuse_waiting()
        held, self._held = self._held, []
        for one in held:
            yield from self._handle(one, self._checked_at)
        for ticket, drop in self._drops.items():
            yield ev.Dropped(ticket, drop.segments, drop.nbytes, failed=True)
        self._drops.clear()

    def _check_time(self, now: float) -> Iterator[ev.Command]:
        set_back = now < self._latest - CHECK_S
        self._latest = now
        due = set_back or now - self._checked_at >= CHECK_S
        if self.state == "on" and (due or self._unrecorded) and not self._synchronizing:
            self._checked_at = now
            self._synchronizing = True
            yield self.synchronize()
            if set_back:  # read the index again, without uses in the future
                yield from self._leave()
                yield from self._open(now)
        elif self.state == "off" and self.limits.limit_bytes and due:
            yield from self._open(now)

    def synchronize(self) -> ev.Synchronize:
        """Return the command that records uses which are not on disk."""
        used = [replace(self.index.segments[key]) for key in self._unrecorded if key in self.index]
        self._unrecorded.clear()
        return ev.Synchronize(used)

    def refuse_waiting(self) -> list[ev.Command]:
        """Refuse the offers for which segments are still to be deleted."""
        waiting = self.writes.take_waiting().items()
        return [it for key, found in waiting for it in self._refuse(found.life, key, "off")]

    def restarted(self, reason: str) -> PrefixStore:
        """Return a machine without the index of this one, which is inconsistent.

        Call `refuse_waiting` first. The new one is off until `CHECK_S` have passed. Workers keep
        what they know, which is harmless.
        """
        new = PrefixStore()
        new.limits, new.readers, new.writes = self.limits, self.readers, self.writes
        new.fault, new._opens, new._checked_at = reason, self._opens, self._checked_at
        new.evicted, new._damaged = self.evicted, self._damaged
        return new

    # -- reports of workers -----------------------------------------------------------------------

    def _reported(self, event: ev.Reported, now: float) -> Iterator[ev.Command]:
        match event.report:
            case wire.SegmentsOpened(space=space):
                yield from self._open_space(event, space)
            case wire.SegmentOffered() as offer:
                yield from self._offered(event, offer, now)
            case wire.SegmentWritten(segment=segment):
                if (permission := self.writes.take(event.life, segment.key)) is not None:
                    yield from self._store(permission, segment.nbytes, now)
            case wire.SegmentAbandoned(key=key, nbytes=nbytes):
                if (permission := self.writes.take(event.life, key)) is not None and nbytes:
                    yield from self._count(min(nbytes, permission.nbytes), now)
            case wire.SegmentUsed(key=key, seconds=seconds, prefill_s=prefill_s):
                if key in self.index:
                    used = self.index.hit(key, prefill_s - seconds, now)
                    self._unrecorded.update(it.key for it in used)
            case wire.SegmentDamaged(key=key):
                self._damaged.add(key)
                yield from self._delete_damaged()
            case _:
                assert_never(event.report)

    def _open_space(self, event: ev.Reported, space: bytes) -> Iterator[ev.Command]:
        if self.readers.open(event.life, event.model, space) and self.state == "on":
            yield ev.RecordModel(space, event.model)
        if self.limits.limit_bytes:
            self.readers.list_later(event.life, self.index.keys_in(space))
            yield from self.readers.list_next(event.life, self.index.segments)

    def _offered(
        self, event: ev.Reported, offer: wire.SegmentOffered, now: float
    ) -> Iterator[ev.Command]:
        worker, segment = self.readers.workers.get(event.life), offer.segment
        refusal = self._refusal(worker, offer, now, draining=event.draining)
        if worker is None or refusal is not None:
            yield from self._refuse(event.life, segment.key, refusal or "off", event.model)
            return
        permission = Permission(event.life, worker.space, segment)
        needed = self.index.nbytes + self.writes.reserved_bytes + permission.nbytes
        kept = {segment.base, *self.writes.bases}
        evicted = self.index.evict(needed - self.limits.limit_bytes, now, kept)
        if needed - sum(it.nbytes for it in evicted) > self.limits.limit_bytes:
            self.index.restore(evicted)
            yield from self._refuse(event.life, segment.key, "limit", event.model)
            return
        self.writes.permissions[segment.key] = permission
        yield from self._evicted(evicted)
        yield ev.MakeRoom(segment.key, [it.key for it in evicted])

    def _refusal(
        self, worker: Reader | None, offer: wire.SegmentOffered, now: float, *, draining: bool
    ) -> ev.Refusal | None:
        segment = offer.segment
        if self.state != "on" or worker is None:
            return "off"
        if segment.key in self.index:
            return "stored"
        permissions = self.writes.permissions
        in_use = segment.key in permissions or segment.key in self.deleting
        if in_use or len(permissions) >= MAX_PERMISSIONS:
            return "busy"
        if not self.index.accepts(worker.space, segment):
            return "invalid"
        nbytes = Permission(0, worker.space, segment).nbytes
        used = self.writes.today(now) + self.writes.reserved_bytes
        left = self.limits.daily_bytes - used - nbytes
        # Most prefixes are never used again. They may use only half of the daily writes.
        first = not (offer.hits or draining)
        kept = self.limits.daily_bytes // 2 if first else 0
        return "daily_writes" if left < kept else None

    def _room_made(self, event: ev.RoomMade, now: float) -> Iterator[ev.Command]:
        permission = self.writes.permissions.get(event.key)
        self._forget(event.evicted)
        if permission is None:  # the worker's process ended
            return
        segment = permission.segment
        writing = self.writes.allowed_bytes + permission.nbytes
        missing = self.limits.keep_free_bytes + writing - event.free_bytes
        refusal: ev.Refusal | None = None
        if missing > 0:
            refusal = "keep_free"
        elif not self.index.accepts(permission.space, segment):  # its base was damaged
            refusal = "invalid"
        elif self.stored_bytes + permission.nbytes > self.limits.limit_bytes:  # it was lowered
            refusal = "limit"
        if refusal is not None:
            del self.writes.permissions[event.key]
            yield from self._refuse(permission.life, event.key, refusal)
            if refusal == "keep_free":  # the next segment may find room
                yield from self._free(missing, now)
            return
        permission.allowed = True
        allowed = wire.SegmentAllowed(key=event.key, allowed=True)
        yield ev.SendToWorker(permission.life, allowed)

    def _store(self, permission: Permission, nbytes: int, now: float) -> Iterator[ev.Command]:
        """Add a complete file to the index."""
        if self.state != "on":
            return  # the next scan finds the file
        segment = Segment(
            key=permission.segment.key,
            space=permission.space,
            base=permission.segment.base,
            tokens=permission.segment.tokens,
            nbytes=nbytes,
            created=now,
            used=now,
        )
        fits = nbytes <= permission.nbytes and not permission.revoked
        if not (fits and self.index.accepts(segment.space, segment.info)):
            yield from self._count(nbytes, now)  # or its base was deleted
            self.deleting[segment.key] = nbytes
            yield ev.DeleteSegments([segment.key])
            yield from self.readers.send_changes([], [segment])
            return
        self.index.add(segment)
        yield from self._count(nbytes, now, segment)
        yield from self.readers.send_changes([segment], except_life=permission.life)

    def _count(
        self, nbytes: int, now: float, segment: Segment | None = None
    ) -> Iterator[ev.Command]:
        """Count bytes as written today. Those of an abandoned file may have been."""
        if self.state == "on":
            day = self.writes.count(nbytes, now)
            yield ev.RecordWritten(day, nbytes, None if segment is None else replace(segment))

    def _exited(self, life: int) -> Iterator[ev.Command]:
        self.readers.close(life)
        self.writes.take_waiting([life])
        keys = self.writes.keys_of(life)
        if self.state == "on" and keys:
            yield ev.Settle(keys)
        elif self.state != "on":
            for key in keys:  # the next scan deletes what is left of them
                del self.writes.permissions[key]

    def _settled(self, event: ev.Settled, now: float) -> Iterator[ev.Command]:
        found = {segment.key: segment for segment in event.found}
        for key in event.keys:
            permission = self.writes.permissions.pop(key, None)
            if permission is None:
                continue
            if key in found:
                yield from self._store(permission, found[key].nbytes, now)
            else:
                yield from self._count(permission.nbytes, now)

    # -- deletion ---------------------------------------------------------------------------------

    def _fit(self, now: float) -> Iterator[ev.Command]:
        """Evict segments until the limit is kept, in case it was lowered."""
        excess = self.index.nbytes + self.writes.reserved_bytes - self.limits.limit_bytes
        yield from self._evict(excess, now)

    def _free(self, nbytes: int, now: float) -> Iterator[ev.Command]:
        """Give bytes back to the file system, those that are being deleted included."""
        yield from self._evict(nbytes - sum(self.deleting.values()), now)

    def _evict(self, nbytes: int, now: float) -> Iterator[ev.Command]:
        """Evict at most `MAX_DELETED` segments; the next ones follow once these are deleted."""
        evicted = self.index.evict(nbytes, now, self.writes.bases, MAX_DELETED)
        yield from self._evicted(evicted)
        if evicted:
            yield ev.DeleteSegments([it.key for it in evicted])

    def _evicted(self, segments: list[Segment]) -> Iterator[ev.Command]:
        self.evicted += len(segments)
        yield from self._removed(segments)

    def _drop(self, event: ev.DropRequested, now: float) -> Iterator[ev.Command]:
        if self.state != "on":
            yield ev.Dropped(event.ticket, failed=True)
            return

        def concerns(space: bytes) -> bool:
            return event.model is None or event.model in self.readers.models.get(space, ())

        keys = [
            key
            for space, found in self.index.spaces.items()
            if concerns(space)
            for key, segment in found.segments.items()
            if event.unused_s is None or now - segment.used >= event.unused_s
        ]
        for permission in self.writes.permissions.values():
            permission.revoked |= not event.unused_s and concerns(permission.space)
        self._drops[event.ticket] = _Drop(keys)
        yield from self._drop_next(event.ticket)

    def _drop_next(self, ticket: int) -> Iterator[ev.Command]:
        """Delete the next segments of a drop, or answer it."""
        drop = self._drops[ticket]
        while drop.keys:
            part, drop.keys[-MAX_DELETED:] = drop.keys[-MAX_DELETED:], []
            # Whatever depends on a segment is in its space, and was not used later.
            if keys := self.index.with_dependents(part):
                drop.segments += len(keys)
                drop.nbytes += sum(self.index.segments[key].nbytes for key in keys)
                yield from self._removed([self.index.remove(key) for key in keys])
                yield ev.DeleteSegments(keys, ticket)
                return
        del self._drops[ticket]
        yield ev.Dropped(ticket, drop.segments, drop.nbytes)

    def _delete_damaged(self) -> Iterator[ev.Command]:
        """Delete damaged segments and all that depend on them; their files once the store is on."""
        keys = self.index.with_dependents(self._damaged)
        yield from self._removed([self.index.remove(key) for key in keys])
        if self.state == "on":
            self._damaged.clear()
            if keys:
                yield ev.DeleteSegments(keys)

    def _removed(self, segments: list[Segment]) -> Iterator[ev.Command]:
        """Count segments that are out of the index until their files are deleted."""
        self.deleting.update((it.key, it.nbytes) for it in segments)
        yield from self.readers.send_changes([], segments)

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.deleting.pop(key, None)

    # -- answers ----------------------------------------------------------------------------------

    def _refuse(
        self, life: int, key: bytes, reason: ev.Refusal, model: str | None = None
    ) -> Iterator[ev.Command]:
        worker = self.readers.workers.get(life)
        yield ev.Refused(model or (worker.model if worker else ""), reason)
        yield ev.SendToWorker(life, wire.SegmentAllowed(key=key, allowed=False))
