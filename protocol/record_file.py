"""Record files: stored prefixes, and rows that are swapped out.

::

    start                names the format
    for each record:     head, content, check
    end mark             a head whose length has the highest bit set, and counts the records; check

A head has 16 bytes, little-endian: the length of the content (8), and a checksum of these 8 bytes.
A damaged length is therefore found before memory is allocated for it. The check has 16 bytes, and
covers the head, the content and the place of the record in its file.

The format computes the checks, and may encrypt the contents (`protocol.record_format`).

A file is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from xxhash import xxh3_64_intdigest

from protocol.record_format import CHECK_BYTES, FileFormat, Opening, RecordFormat
from protocol.segments import PART_SUFFIX

_HEAD = struct.Struct("<QQ")
_END = 1 << 63
_MAPPED_BYTES = 8 * 1024 * 1024


class DamagedFile(Exception):
    """A file that was read is not exactly what was written."""


class RecordWriter:
    """A record file that is being written; raises `OSError` if it cannot be created.

    A temporary file that an ended process has left is replaced. ``sync``: whether `finish` waits
    until the file is on disk.
    """

    def __init__(self, path: Path, form: RecordFormat, *, sync: bool) -> None:
        self.path = path
        self._file: Path | None = path.with_suffix(PART_SUFFIX)
        """The file as it is named now; None after `finish` or `abort`."""
        self._sync = sync
        self._records = 0
        start, self._format = form.create()
        self.nbytes = 0
        """Bytes written so far."""
        self._file.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self._file, flags, 0o600)
        try:
            self._write(start)
        except OSError:
            self.abort()
            raise

    def add(self, record: bytes | memoryview) -> None:
        """Write a record; raises `OSError`. Call `abort` after an error."""
        content = memoryview(record).cast("B")
        self._seal(content.nbytes, content)
        self._records += 1

    def finish(self) -> int:
        """Rename the complete file and return its size; raises `OSError`.

        Call `abort` after an error.
        """
        assert self._file is not None, "a file is finished once"
        self._seal(_END | self._records, memoryview(b""))
        if self._sync:
            os.fsync(self._fd)
        self._close()
        self._file = self._file.rename(self.path)
        if self._sync:
            sync_folder(self.path.parent)
        self._file = None
        return self.nbytes

    def abort(self) -> None:
        """Close and delete the file; does nothing after `finish` succeeded."""
        with contextlib.suppress(OSError):  # some file systems report a full disk here
            self._close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
            self._file = None

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _seal(self, length: int, content: memoryview) -> None:
        head = _head(length)
        sealing = self._format.seal_next(head)
        self._write(head)
        for piece in _pieces(content, self._format.piece_bytes):
            self._write(sealing.seal(piece))
        self._write(sealing.check())

    def _write(self, data: bytes | memoryview) -> None:
        left = memoryview(data)
        while left:
            written = os.write(self._fd, left)
            self.nbytes += written
            left = left[written:]


@dataclass(frozen=True)
class UnreadRecord:
    """A record that a `RecordReader` has passed over, and that can be read later."""

    reader: RecordReader
    number: int
    start: int
    """Where its content begins in the file."""
    nbytes: int
    opening: Opening

    def read(self, memory: memoryview | None = None) -> memoryview:
        """Return the content; raises ``damaged`` or `OSError`.

        Call it once, in any thread, while the reader is open. ``memory``: ``nbytes`` bytes that the
        content is read into.
        """
        return self.reader.read_content(self, memory)


class RecordReader:
    """An open record file; iterates over its records.

    Opening raises `OSError` if the file is missing or unreadable, and ``damaged`` if it is no
    regular file, not complete or of another format. Each record is checked before it is returned:
    iterating raises ``damaged`` or `OSError`. Records are read with one copy. Files are not mapped
    into memory, because a bad sector would then end the process by SIGBUS.
    """

    def __init__(
        self, path: Path, form: RecordFormat, damaged: type[DamagedFile] = DamagedFile
    ) -> None:
        self._path = path
        self._damaged = damaged
        self._count = 0
        """Records read so far."""
        try:
            # O_NONBLOCK: opening a named pipe does not wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise self._damage("is a symbolic link") from None
        try:
            self._format = self._open(form)
            self._head = self._read(_HEAD.size)
            self._length = self._parse(self._head)
            """Length of the next record's content."""
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        if (record := self.next_unread()) is None:
            raise StopIteration
        return record.read()

    def next_unread(self) -> UnreadRecord | None:
        """Pass over the next record and return it; None: it was the last one.

        Call it in one thread at a time. Raises ``damaged`` or `OSError`.
        """
        head, length, start = self._head, self._length, self._at
        if length & _END:
            self._check_end()
            return None
        if length > self.nbytes - start - CHECK_BYTES - _HEAD.size:
            raise self._damage("ends within a record")
        self._at += length
        after = self._read(CHECK_BYTES + _HEAD.size)
        opening = self._format.open_next(head, after[:CHECK_BYTES])
        record = UnreadRecord(self, self._count, start, length, opening)
        self._count += 1
        self._head = after[CHECK_BYTES:]
        self._length = self._parse(self._head)
        return record

    def read_content(self, record: UnreadRecord, memory: memoryview | None) -> memoryview:
        """Return what `UnreadRecord.read` does."""
        content = _memory(record.nbytes) if memory is None else memory
        at = record.start
        for piece in _pieces(content, self._format.piece_bytes):
            self._read_into(piece, at)
            at += piece.nbytes
            record.opening.open(piece)
        if not record.opening.verify():
            raise self._damage(f"has a wrong check of record {record.number}")
        return content

    def _check_end(self) -> None:
        at_end = self._at == self.nbytes - CHECK_BYTES and self._length == _END | self._count
        if not at_end or not self._format.open_next(self._head, self._read(CHECK_BYTES)).verify():
            raise self._damage("has an end mark that does not match its records")

    def _open(self, form: RecordFormat) -> FileFormat:
        """Check the file's two ends."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise self._damage("is not a regular file")
        self.nbytes = status.st_size
        """Size of the file."""
        end_bytes = _HEAD.size + CHECK_BYTES
        if self.nbytes < form.start_bytes + end_bytes:
            raise self._damage(f"has only {self.nbytes} bytes")
        self._at = self.nbytes - end_bytes
        if not self._parse(self._read(_HEAD.size)) & _END:
            raise self._damage("has no end mark")
        self._at = 0
        start = self._read(form.start_bytes)
        if (found := form.open(start)) is None:
            raise self._damage(f"has another format: it begins with {start[:16]!r}")
        return found

    def _parse(self, head: bytes) -> int:
        """Return the length of a content."""
        length: int = _HEAD.unpack(head)[0]
        if head != _head(length):
            raise self._damage("has a damaged length")
        return length

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        self._read_into(memoryview(data), self._at)
        self._at += size
        return bytes(data)

    def _read_into(self, left: memoryview, at: int) -> None:
        while left:
            size = os.preadv(self._fd, [left], at)
            if not size:
                raise self._damage("became shorter while it was read")
            at += size
            left = left[size:]

    def _damage(self, problem: str) -> DamagedFile:
        return self._damaged(f"{self._path.name} {problem}")


def read_records(
    path: Path, form: RecordFormat, damaged: type[DamagedFile] = DamagedFile
) -> Iterator[memoryview]:
    """Yield the records of a file; raises what `RecordReader` raises."""
    with RecordReader(path, form, damaged) as reader:
        yield from reader


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk; raises `OSError`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _memory(nbytes: int) -> memoryview:
    """Return memory to read into. Large memory is mapped instead of filled with zeros.

    Python holds its lock while it fills a `bytearray`: with 64 MiB, another thread waited 250 ms,
    and 20 ms if it was mapped (2 busy cores). Records of 2 MiB are read half as fast when mapped.
    """
    if nbytes < _MAPPED_BYTES:
        return memoryview(bytearray(nbytes))
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE))


def _pieces(content: memoryview, nbytes: int) -> Iterator[memoryview]:
    for at in range(0, content.nbytes, nbytes):
        yield content[at : at + nbytes]


def _head(length: int) -> bytes:
    return _HEAD.pack(length, xxh3_64_intdigest(length.to_bytes(8, "little")))
