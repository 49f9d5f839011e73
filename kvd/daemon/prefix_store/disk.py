"""The disk commands of the prefix store.

Each command leaves files and index in a state from which the next `OpenStore` finds every file
again, so the process may end anywhere.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import assert_never

import structlog

from actors.machines import prefix_store_events as ev
from actors.machines.segment_index import SegmentIndex
from actors.machines.segment_writes import DAY_S
from kvd.daemon.prefix_store.folder import SegmentFolder
from kvd.daemon.prefix_store.index_file import IndexFile
from protocol.key_file import read_key

LEAST_FREE_BYTES = 1024 * 1024
"""Free bytes with which sqlite can open the index."""


class StoreDisk:
    """Runs the commands of the prefix store, blocking.

    ``key_file``: the file with the key of encrypted segments; None: they are not encrypted.
    """

    def __init__(self, folder: SegmentFolder, key_file: Path | None = None) -> None:
        self._folder = folder
        self._key_file = key_file
        self._index_file: IndexFile | None = None
        self._log = structlog.get_logger("kvd.daemon.prefix_store")

    def run(self, command: ev.DiskCommand) -> ev.DiskEvent | None:  # noqa: C901 - one match
        """Run a command and return its answer; raises OSError and `sqlite3.Error`."""
        match command:
            case ev.OpenStore():
                return self._open(command)
            case ev.MakeRoom(key=key, evicted=evicted):
                self._delete(evicted)
                self._folder.prepare(key)
                return ev.RoomMade(key, evicted, self._folder.free_bytes())
            case ev.DeleteSegments(keys=keys, ticket=ticket):
                self._delete(keys)
                return ev.SegmentsDeleted(keys, ticket)
            case ev.Settle(keys=keys):
                for key in keys:
                    self._folder.delete_part(key)
                found = [self._folder.read(key) for key in keys]
                return ev.Settled(keys, [it for it in found if it is not None])
            case ev.RecordWritten(day=day, nbytes=nbytes, segment=segment):
                with self._recording() as index:
                    index.count_written(day, nbytes)
                    if segment is not None:
                        index.add(segment)
            case ev.Synchronize(used=used):
                if used:
                    with self._recording() as index:
                        index.record_uses(used)
                return ev.FreeBytesRead(self._folder.free_bytes())
            case ev.RecordModel(space=space, model=model):
                with self._recording() as index:
                    index.add_model(space, model)
            case _:
                assert_never(command)
        return None

    def close(self) -> None:
        if self._index_file is not None:
            self._index_file.close()
            self._index_file = None

    @contextlib.contextmanager
    def _recording(self) -> Iterator[IndexFile]:
        """Change the index in one transaction, or not at all if the disk is full.

        The next `OpenStore` finds what is missing, except uses and the names of models.
        """
        if self._index_file is None:
            raise sqlite3.OperationalError("the index is not open")
        try:
            with self._index_file.transaction():
                yield self._index_file
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_FULL:
                raise
            self._log.warning("the index is not written: the disk is full")

    def _open(self, command: ev.OpenStore) -> ev.StoreOpened:
        self.close()
        key_id = self._set_format()
        self._folder.create()
        index = self._index_file = self._open_index()
        known = index.segments()
        scan = self._folder.scan(command.writing)
        sizes = scan.sizes
        same_key = index.key_id() == key_id
        # With another key every file is read, and thereby deleted unless the key fits.
        kept = {key: it for key, it in known.items() if same_key and sizes.get(key) == it.nbytes}
        unknown = [key for key in sizes if key not in kept and key not in command.writing]
        read = [self._folder.read(key, expects_damage=not same_key) for key in unknown]
        new = [segment for segment in read if segment is not None]
        written = scan.deleted + [  # not counted before
            (int(it.created // DAY_S), it.nbytes) for it in new if it.key not in known
        ]
        found = [*kept.values(), *new]
        for segment in found:
            segment.used = min(segment.used, command.now)
        segments = SegmentIndex()
        rejected = segments.add_all(it for it in found if it.key not in command.writing)
        with self._recording():
            for day, nbytes in written:
                index.count_written(day, nbytes)
            index.remove(known.keys() - kept.keys())
            for segment in new:
                index.add(segment)
            index.forget_models(segments.spaces.keys())
            index.set_key_id(key_id)
        self._delete([it.key for it in rejected])
        damaged, self._folder.damaged = self._folder.damaged, []
        return ev.StoreOpened(command.seq, segments, index.written(), index.models(), damaged)

    def _open_index(self) -> IndexFile:
        """Open the index; one in memory if the disk is full, so that segments can be deleted."""
        try:
            return IndexFile(self._folder.root / "index.sqlite")
        except sqlite3.Error as error:
            if self._folder.free_bytes() >= LEAST_FREE_BYTES:
                raise
            self._log.warning("the index is kept in memory: the disk is full", reason=str(error))
            return IndexFile(None)

    def _set_format(self) -> bytes:
        """Read the key; return what names it, empty without encryption. Raises `OSError`."""
        if self._key_file is None:
            return b""
        from protocol.record_cipher import RecordCipher  # noqa: PLC0415 - takes 10 MB of memory

        cipher = self._folder.form = RecordCipher(read_key(self._key_file))
        return cipher.derive(b"key id")

    def _delete(self, keys: list[bytes]) -> None:
        """Delete files before their entries: a file without an entry counts again."""
        for key in keys:
            self._folder.delete(key)
        if keys:
            with self._recording() as index:
                index.remove(keys)
