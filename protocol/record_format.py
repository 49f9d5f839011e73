"""How the records of a record file (`protocol.record_file`) become bytes.

`PLAIN` chains checksums: the checksum of each record is seeded with the one before it, so a record
is valid only in its place and in its file. They are xxHash, so they find damage, not forgery.
`protocol.record_cipher` encrypts the records, and its checks also find forgery.
"""

from __future__ import annotations

from typing import Protocol

from xxhash import xxh3_128

MAGIC = b"kvd records 2\n\0\0"
PIECE_BYTES = 512 * 1024
"""Bytes of an encrypted record that are read or written at once. They stay in the CPU's cache, and
another thread waits for Python's lock at most while one piece is encrypted: 0.025 ms (two cores
of an EPYC). With 256 KiB, encrypted records of 336 KiB are read at 4.0 instead of 4.3 GB/s."""
PLAIN_PIECE_BYTES = 2 * 1024 * 1024
"""Bytes of a plain record that are read or written at once. Reading and hashing them releases
Python's lock. Eight threads read records of 9 MB at 32 GB/s, and at 27 in pieces of 512 KiB, each
of which takes the lock twice (host of an H200)."""
CHECK_BYTES = 16


class Sealing(Protocol):
    """Makes bytes of one record, which it gets in pieces of at most ``piece_bytes``, in order."""

    def seal(self, piece: memoryview) -> memoryview:
        """Return what to write for a piece. It is valid until the next call."""

    def check(self) -> bytes:
        """Return the record's check. Call it once, at the end."""


class Opening(Protocol):
    """Makes a record of bytes, which it gets in pieces of at most ``piece_bytes``, in order."""

    def open(self, piece: memoryview) -> None:
        """Restore a piece in place."""

    def verify(self) -> bool:
        """Return whether this is the record that was sealed. Call it once, at the end."""


class FileFormat(Protocol):
    """The format of one file that is either written or read."""

    piece_bytes: int
    """Most bytes that are sealed or opened at once."""

    def seal_next(self, head: bytes) -> Sealing:
        """Begin the next record, or the end mark, that is written."""

    def open_next(self, head: bytes, check: bytes) -> Opening:
        """Pass over the next record, or the end mark; return what opens it, now or later.

        Records may be opened at the same time, in several threads. ``check``: the record's check,
        as it is in the file.
        """


class RecordFormat(Protocol):
    """How the records of a file become bytes."""

    start_bytes: int
    """Length of a file's start."""

    def create(self) -> tuple[bytes, FileFormat]:
        """Return the start of a new file, and its format."""

    def open(self, start: bytes) -> FileFormat | None:
        """Return the format of a file with this start; None: the file has another format."""


class _Checksums:
    """The chain of checksums of one file."""

    piece_bytes = PLAIN_PIECE_BYTES

    def __init__(self) -> None:
        self.seed = 0
        """Part of the last record's checksum."""

    def seal_next(self, head: bytes) -> Sealing:
        return _Sealing(self, head)

    def open_next(self, head: bytes, check: bytes) -> Opening:
        opening = _Opening(self.seed, head, check)
        self.go_on(check)
        return opening

    def go_on(self, check: bytes) -> None:
        self.seed = int.from_bytes(check[:8], "little")


class _Sealing:
    """Leaves the pieces as they are."""

    def __init__(self, file: _Checksums, head: bytes) -> None:
        self._file = file
        self._hash = xxh3_128(head, seed=file.seed)

    def seal(self, piece: memoryview) -> memoryview:
        self._hash.update(piece)
        return piece

    def check(self) -> bytes:
        check = self._hash.digest()
        self._file.go_on(check)
        return check


class _Opening:
    """Leaves the pieces as they are."""

    def __init__(self, seed: int, head: bytes, check: bytes) -> None:
        self._hash = xxh3_128(head, seed=seed)
        self._check = check

    def open(self, piece: memoryview) -> None:
        self._hash.update(piece)

    def verify(self) -> bool:
        return self._hash.digest() == self._check


class _Plain:
    """`RecordFormat` without encryption."""

    start_bytes = len(MAGIC)

    def create(self) -> tuple[bytes, FileFormat]:
        return MAGIC, _Checksums()

    def open(self, start: bytes) -> FileFormat | None:
        return _Checksums() if start == MAGIC else None


PLAIN: RecordFormat = _Plain()
