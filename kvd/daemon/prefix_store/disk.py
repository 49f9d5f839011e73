"""The disk commands of the prefix store.

Each command leaves files and index in a state from which the next `OpenStore` finds every file
again, so the process may end anywhere.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import assert_never

from actors.machines import prefix_store_events as ev
from actors.machines.segment_index import SegmentIndex
from actors.machines.segment_writes import DAY_S
from kvd.daemon.prefix_store.folder import SegmentFolder
from kvd.daemon.prefix_store.index_file import IndexFile
from protocol.key_file import read_key


class StoreDisk:
    """Runs the commands of the prefix store, blocking.

    ``key_file``: the file with the key of encrypted segments; None: they are not encrypted.
    """

    def __init__(self, folder: SegmentFolder, key_file: Path | None = None) -> None:
        self._folder = folder
        self._key_file = key_file
        self._index_file: IndexFile | None = None

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
                with self._index.transaction():
                    self._index.count_written(day, nbytes)
                    if segment is not None:
                        self._index.add(segment)
            case ev.Synchronize(used=used):
                if used:
                    with self._index.transaction():
                        self._index.record_uses(used)
                return ev.FreeBytesRead(self._folder.free_bytes())
            case ev.RecordModel(space=space, model=model):
                self._index.add_model(space, model)
            case _:
                assert_never(command)
        return None

    def close(self) -> None:
        if self._index_file is not None:
            self._index_file.close()
            self._index_file = None

    @property
    def _index(self) -> IndexFile:
        if self._index_file is None:
            raise sqlite3.OperationalError("the index is not open")
        return self._index_file

    def _open(self, command: ev.OpenStore) -> ev.StoreOpened:
        self.close()
        key_id = self._set_format()
        self._folder.create()
        index = self._index_file = IndexFile(self._folder.root / "index.sqlite")
        known = index.segments()
        scan = self._folder.scan(command.writing)
        sizes = scan.sizes
        same_key = index.key_id() == key_id
        # With another key every file is read, and thereby deleted unless the key fits.
        kept = {key: it for key, it in known.items() if same_key and sizes.get(key) == it.nbytes}
        found = SegmentIndex()
        with index.transaction():
            for day, nbytes in scan.deleted:
                index.count_written(day, nbytes)
            index.remove(key for key in known if key not in kept)
            for key in sizes:
                if key in kept or key in command.writing:
                    continue
                segment = self._folder.read(key, expects_damage=not same_key)
                if segment is not None:
                    kept[key] = segment
                    index.add(segment)
                    if key not in known:  # it was written, but not counted
                        index.count_written(int(segment.created // DAY_S), segment.nbytes)
            for segment in kept.values():
                segment.used = min(segment.used, command.now)
            rejected = found.add_all(it for it in kept.values() if it.key not in command.writing)
            index.set_key_id(key_id)
        self._delete([it.key for it in rejected])
        damaged, self._folder.damaged = self._folder.damaged, []
        return ev.StoreOpened(command.seq, found, index.written(), index.models(), damaged)

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
            with self._index.transaction():
                self._index.remove(keys)
