"""Segment files: a header, then the records of a segment (`protocol.segments`).

Both are records of a record file (`protocol.record_file`), plain or encrypted. The header is the
first one, and records are valid only in their file: those of another segment never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.fields import PositiveCount
from protocol.record_file import DamagedFile, RecordReader, RecordWriter, sync_folder
from protocol.record_format import RecordFormat
from protocol.segments import KEY_BYTES, SegmentInfo, segment_path

VERSION = 1
"""Raise it when kvd writes other records for the same prompt, or other numbers in them.

Files of other versions are not read. It is part of the space, so other versions have other keys.
"""
_Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class DamagedSegment(DamagedFile):
    """A segment's file is not exactly what was written, or not what its name says."""


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first record of a segment's file. Fields are those of `protocol.segments`."""

    version: int
    space: _Key
    key: _Key
    base: _Key | None = None
    tokens: PositiveCount
    """Tokens of the whole prefix."""
    nbytes: int = 0
    """Size of the file. `read_header` sets it; it is not written."""

    @property
    def info(self) -> SegmentInfo:
        return SegmentInfo(key=self.key, base=self.base, tokens=self.tokens, nbytes=self.nbytes)


def create(folder: Path, header: SegmentHeader, form: RecordFormat) -> RecordWriter:
    """Create a segment's file below the store's folder, under its temporary name.

    Raises `OSError`.
    """
    path = segment_path(folder, header.key)
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        sync_folder(folder)
    file = RecordWriter(path, form, sync=True)
    try:
        file.add(msgspec.msgpack.encode(header))
    except OSError:
        file.abort()
        raise
    return file


def read_header(path: Path, form: RecordFormat) -> SegmentHeader:
    """Return the header of a complete file; raises `DamagedSegment` or `OSError`.

    Does not check the other records.
    """
    with RecordReader(path, form, DamagedSegment) as reader:
        return _header(path, reader)


def open_records(
    path: Path,
    form: RecordFormat,
    segment: SegmentInfo | None = None,
) -> RecordReader:
    """Return a reader of the records after the header; raises `DamagedSegment` or `OSError`.

    ``segment``: what the index knows of the file. If the header says otherwise, pages of another
    prompt would be read as those of the base.
    """
    reader = RecordReader(path, form, DamagedSegment)
    try:
        _header(path, reader, segment)
    except BaseException:
        reader.close()
        raise
    return reader


def read_records(path: Path, form: RecordFormat) -> Iterator[memoryview]:
    """Yield the records after the header; raises `DamagedSegment` or `OSError`."""
    with open_records(path, form) as reader:
        yield from reader


def _header(path: Path, reader: RecordReader, segment: SegmentInfo | None = None) -> SegmentHeader:
    try:
        header = msgspec.msgpack.decode(next(reader), type=SegmentHeader)
    except (msgspec.MsgspecError, StopIteration, UnicodeDecodeError, RecursionError):
        raise DamagedSegment(f"{path.name} has no header of a segment") from None
    if header.version != VERSION:
        raise DamagedSegment(f"{path.name} has version {header.version}, not {VERSION}")
    if header.key.hex() != path.stem:
        raise DamagedSegment(f"{path.name} has the key {header.key.hex()}, not that of its name")
    header = msgspec.structs.replace(header, nbytes=reader.nbytes)
    if segment is not None and segment != header.info:
        raise DamagedSegment(f"{path.name} has another base, length or size than in the index")
    return header
