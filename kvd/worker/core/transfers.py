"""Preempted rows on their way to or from the swap folder, by request.

A transfer takes several steps, and its request may end at any time. `Batch` discards the transfers
of a request with the request itself.
"""

from __future__ import annotations

import hashlib

from kvd.worker.cache.snapshot_records import SnapshotReader
from kvd.worker.core.request import SwappedRows
from kvd.worker.core.swap import SwapFile, SwapFolder


class Transfers:
    """The unfinished transfers of one engine, and its swap folder."""

    def __init__(self, folder: SwapFolder) -> None:
        self.folder = folder
        self.reading: dict[str, SnapshotReader] = {}
        """Requests that are admitted and whose rows are being read."""
        self.writing: dict[str, SwapFile] = {}

    def start_writing(self, rid: str, nbytes: int) -> SwapFile:
        """Create the file of a request; raises `OSError`."""
        # Request ids may contain any character, so the file name is a digest.
        name = hashlib.sha256(rid.encode()).hexdigest()[:32]
        file = self.writing[rid] = self.folder.create(name, nbytes)
        return file

    def abort_writing(self, rid: str) -> None:
        file = self.writing.pop(rid, None)
        if file is not None:
            file.abort()
            self.folder.delete(file.path)

    def abort_reading(self, rid: str) -> None:
        """Free the pages that were read so far."""
        reader = self.reading.pop(rid, None)
        if reader is not None:
            reader.forget()

    def discard(self, rid: str, swapped: SwappedRows | None) -> None:
        """Abort the transfers of a request that has ended, and delete its file."""
        self.abort_reading(rid)
        self.abort_writing(rid)
        if swapped is not None:
            self.folder.delete(swapped.path)
