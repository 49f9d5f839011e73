"""The segment files of a store, without an engine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_io import NOT_YET, BackgroundReader, SegmentRecord
from protocol import segment_file
from protocol.record_format import PLAIN
from protocol.segments import SUFFIX

_READ_BYTES = 8 << 20
_MEMORY_BYTES = 96 << 20
"""Memory for eleven records of 9 MB."""


class Files:
    """All segment files below a store's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def _paths(self) -> list[Path]:
        return sorted(self._folder.rglob(f"*{SUFFIX}"))

    def drop_from_page_cache(self) -> None:
        """Make the next read come from the disk, where the system allows that (Linux)."""
        for path in self._paths:
            fd = os.open(path, os.O_RDONLY)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def bring_to_page_cache(self) -> None:
        """Read all files, so that they are in the page cache."""
        self._read()

    def read_alone(self) -> dict[str, float]:
        """Return the seconds that reading takes, of all files together.

        Without and with the page cache, and with the checksums; then by some threads that also
        check, while this one copies each record.
        """
        self.drop_from_page_cache()
        return {
            "bytes": float(sum(path.stat().st_size for path in self._paths)),
            "uncached_s": self._read(),
            "cached_s": self._read(),
            "cached_and_checked_s": self._check(),
            **{f"copied_{count}_threads_s": self._copy(count) for count in (1, 2, 4, 6)},
        }

    def _read(self) -> float:
        start = time.perf_counter()
        for path in self._paths:
            with path.open("rb", buffering=0) as file:
                while file.read(_READ_BYTES):
                    pass
        return time.perf_counter() - start

    def _check(self) -> float:
        start = time.perf_counter()
        for path in self._paths:
            with segment_file.open_records(path, PLAIN) as records:
                for _ in records:
                    pass
        return time.perf_counter() - start

    def _copy(self, threads: int) -> float:
        keys = [bytes.fromhex(path.stem) for path in self._paths]
        memory = RecordMemory(_MEMORY_BYTES)
        memory.open()
        start, target = time.perf_counter(), np.empty(0, np.uint8)
        reader = BackgroundReader(
            self._folder,
            keys,
            lambda path: segment_file.open_records(path, PLAIN),
            memory,
            threads=threads,
        )
        while (item := reader.next_record()) is NOT_YET or isinstance(item, SegmentRecord):
            if not isinstance(item, SegmentRecord):
                reader.wait(1.0)
                continue
            source = np.frombuffer(item.content, np.uint8)
            if source.size > target.size:
                target = np.empty(source.size, np.uint8)
            target[: source.size] = source
        return time.perf_counter() - start

    def delete_all(self) -> None:
        """Delete the files, as the daemon does when it evicts segments."""
        for path in self._paths:
            path.unlink()
