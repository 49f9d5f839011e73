"""The prefix store's state machine with a disk that fails and workers that die, all simulated.

Everything that must never happen is checked after each event: a byte above the limit, a byte above
the daily writes, a permission for a file that is there, a file that is not counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from random import Random

from msgspec.structs import replace

from actors.machines import prefix_store_events as ev
from actors.machines.prefix_store import PrefixStore
from actors.machines.segment_index import Segment, SegmentIndex
from actors.machines.segment_writes import DAY_S, Permission
from protocol import worker as wire
from protocol.segments import SegmentInfo

UNLIMITED = 2**62


class StoreSim:
    """One daemon's store. Its files and its index on disk outlive `restart`."""

    def __init__(self, limits: ev.StoreLimits, spaces: int, seed: int = 0) -> None:
        self.limits = limits
        self.now = 0.0
        self.broken = False
        """Whether all disk commands fail."""
        self.files: dict[bytes, Segment] = {}
        """Complete files, as their headers describe them."""
        self.parts: dict[bytes, int] = {}
        """Bytes of incomplete files."""
        self.file_bytes = 0
        """Bytes of all files, those of incomplete ones included."""
        self.written: Counter[int] = Counter()
        """Bytes written by day, those of incomplete files included."""
        self.counts: Counter[str] = Counter()
        self._recorded: dict[bytes, Segment] = {}
        self._days: Counter[int] = Counter()
        self._allowed: dict[bytes, bool] = {}
        self._random = Random(seed)
        self._spaces = [bytes([number]) * 16 for number in range(spaces)]
        self.lives = list(range(spaces))
        """The number of each worker's process."""
        self.machine = PrefixStore()
        self.restart()

    # -- events -----------------------------------------------------------------------------------

    def handle(self, event: ev.Event) -> None:
        events = deque([event])
        while events:
            for command in self.machine.handle(events.popleft(), self.now):
                events.extend(self._execute(command))
        assert self.file_bytes <= self.limits.limit_bytes, "above the limit"

    def report(self, model: int, report: wire.SegmentReport) -> None:
        self.handle(ev.Reported(f"m{model}", self.lives[model], report))

    def knows(self, key: bytes) -> bool:
        return key in self.machine.index

    def offer(self, model: int, segment: SegmentInfo, hits: int, fault: str = "") -> bool:
        """Offer a segment and write it if that is allowed; return whether it is stored now.

        ``fault``: what happens during the write, ``worker`` or ``daemon`` for the end of a process,
        ``disk`` for a failed write.
        """
        self.report(model, wire.SegmentOffered(segment=segment, hits=hits))
        if not self._allowed.pop(segment.key):
            return self.knows(segment.key)
        assert segment.key not in self.files, "a file would be written twice"
        largest = Permission(0, b"", segment).nbytes
        nbytes = self._random.randint(segment.nbytes, largest)
        if fault:
            self.counts[f"{fault} fault"] += 1
            complete = self._random.random() < 0.3 and fault != "disk"
            self._write(
                model, segment, nbytes if complete else self._random.randrange(nbytes), complete
            )
            self._end_write(model, segment.key, fault)
            return self.knows(segment.key)
        self._write(model, segment, nbytes, complete=True)
        segment = replace(segment, nbytes=nbytes)
        self.report(model, wire.SegmentWritten(segment=segment, seconds=0.1))
        return True

    def _write(self, model: int, segment: SegmentInfo, nbytes: int, complete: bool) -> None:
        day = int(self.now // DAY_S)
        self.written[day] += nbytes
        self.file_bytes += nbytes
        assert self.file_bytes <= self.limits.limit_bytes, "above the limit"
        assert self.written[day] <= self.limits.daily_bytes, "more writes than a day may have"
        if not complete:
            self.parts[segment.key] = nbytes
            return
        self.files[segment.key] = Segment(
            key=segment.key,
            space=self._spaces[model],
            base=segment.base,
            tokens=segment.tokens,
            nbytes=nbytes,
            created=self.now,
            used=self.now,
        )

    def _end_write(self, model: int, key: bytes, fault: str) -> None:
        if fault == "disk":
            self._delete_part(key)
            self.report(model, wire.SegmentAbandoned(key=key, reason="disk full", nbytes=4096))
        elif fault == "worker":
            self.replace_worker(model)
        else:
            self.restart()

    def replace_worker(self, model: int) -> None:
        """Let a worker's process end and its successor open the space."""
        ended, self.lives[model] = self.lives[model], self.lives[model] + len(self.lives)
        self.handle(ev.WorkerExited(ended))
        self.report(model, wire.SegmentsOpened(space=self._spaces[model]))

    def restart(self) -> None:
        """Kill the daemon and its workers, and start them again."""
        self.machine = PrefixStore()
        self.handle(ev.LimitsChanged(self.limits))
        for model in range(len(self.lives)):
            self.replace_worker(model)

    def damage(self, model: int, key: bytes) -> None:
        """Let a worker find that a file is damaged."""
        self.counts["damaged"] += 1
        self.report(model, wire.SegmentDamaged(key=key, reason="test"))
        kept = self.broken or self.machine.state != "on"  # `check` finds it once the store is on
        assert kept or key not in self.files, "a damaged file is kept"

    def check(self) -> None:
        self.machine.check()
        if self.machine.state == "on":
            files = {key: it.nbytes for key, it in self.files.items()}
            index = {key: it.nbytes for key, it in self.machine.index.segments.items()}
            assert files == index, "files and index differ"
            assert self.machine.stored_bytes == sum(files.values()), "bytes are counted wrongly"
            assert not self.parts, "an incomplete file is left"

    # -- the disk ---------------------------------------------------------------------------------

    def _execute(self, command: ev.Command) -> Iterator[ev.Event]:
        match command:
            case ev.SendToWorker(command=wire.SegmentAllowed(key=key, allowed=allowed)):
                self._allowed[key] = allowed
            case ev.Refused(reason=reason):
                self.counts[f"refused: {reason}"] += 1
            case ev.Continue(life=life):
                yield ev.Continued(life)
            case ev.SendToWorker() | ev.Announce() | ev.Dropped():
                pass
            case _ if self.broken:
                self.counts["failed disk commands"] += 1
                yield ev.DiskFailed("broken")
            case _:
                yield from self._run(command)

    def _run(self, command: ev.DiskCommand) -> Iterator[ev.Event]:
        match command:
            case ev.OpenStore():
                yield self._open(command)
            case ev.MakeRoom(key=key, evicted=evicted):
                self._delete(evicted)
                yield ev.RoomMade(key, evicted, UNLIMITED)
            case ev.DeleteSegments(keys=keys, ticket=ticket):
                self._delete(keys)
                yield ev.SegmentsDeleted(keys, ticket)
            case ev.Settle(keys=keys):
                for key in keys:
                    self._delete_part(key)
                yield ev.Settled(keys, [self.files[key] for key in keys if key in self.files])
            case ev.RecordWritten(day=day, nbytes=nbytes, segment=segment):
                self._days[day] += nbytes
                if segment is not None:
                    self._recorded[segment.key] = segment
            case ev.Synchronize(used=used):
                self._recorded.update((it.key, it) for it in used)
                yield ev.FreeBytesRead(UNLIMITED)
            case _:
                pass

    def _open(self, command: ev.OpenStore) -> ev.StoreOpened:
        today = int(self.now // DAY_S)
        for key in [key for key in self.parts if key not in command.writing]:
            self._days[today] += self._delete_part(key)
        for key, file in self.files.items():
            if key not in self._recorded and key not in command.writing:
                self._days[int(file.created // DAY_S)] += file.nbytes
                self._recorded[key] = file
        self._recorded = {key: it for key, it in self._recorded.items() if key in self.files}
        index = SegmentIndex()
        copies = [replace(it) for key, it in self._recorded.items() if key not in command.writing]
        self._delete([it.key for it in index.add_all(copies)])
        return ev.StoreOpened(command.seq, index, dict(self._days), {}, [])

    def _delete(self, keys: list[bytes]) -> None:
        for key in keys:
            if (file := self.files.pop(key, None)) is not None:
                self.file_bytes -= file.nbytes
            self._recorded.pop(key, None)

    def _delete_part(self, key: bytes) -> int:
        nbytes = self.parts.pop(key, 0)
        self.file_bytes -= nbytes
        return nbytes
