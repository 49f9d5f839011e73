"""Segment files with any content: exactly what was written, or `DamagedSegment`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from hypothesis.strategies import SearchStrategy

from protocol import segment_file
from protocol.record_cipher import RecordCipher
from protocol.record_file import RecordWriter
from protocol.record_format import PLAIN, RecordFormat
from protocol.segment_file import DamagedSegment, SegmentHeader
from protocol.segments import KEY_BYTES, segment_path
from tests.fuzz.mutations import edited_bytes
from tests.fuzz.target import Check, Target

KEY = bytes(range(KEY_BYTES))
HEADER = SegmentHeader(
    version=segment_file.VERSION, space=b"s" * 16, key=KEY, base=b"b" * 16, tokens=1024
)
CIPHER = RecordCipher(bytes(32))
RECORDS = [b"p" * 700, b"", b"p" * 700, b"t" * 100]


class Segments(Target):
    """The input is the whole file, and also the header's record, with the right checksums."""

    name = "segments"
    examples = 400

    def inputs(self) -> SearchStrategy[bytes]:
        return edited_bytes(self.seeds(), [KEY, b"\xcf" + b"\xff" * 8, b"\xc0", b"\x81"])

    @contextmanager
    def checking(self) -> Iterator[Check]:
        with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
            path = segment_path(Path(folder), KEY)
            path.parent.mkdir()
            valid = _write(path, msgspec.msgpack.encode(HEADER))

            def check(given: bytes) -> None:
                path.write_bytes(given)
                found = _read(path)
                assert found is None or given == valid
                assert _read(path, CIPHER) is None, "a file without the key's check is read"
                _write(path, given)
                found = _read(path)
                assert found is None or found[1] == RECORDS

            yield check


def _write(path: Path, header: bytes) -> bytes:
    file = RecordWriter(path, PLAIN, sync=False)
    for record in (header, *RECORDS):
        file.add(record)
    file.finish()
    return path.read_bytes()


def _read(path: Path, form: RecordFormat = PLAIN) -> tuple[SegmentHeader, list[bytes]] | None:
    try:
        header = segment_file.read_header(path, form)
        records = [bytes(record) for record in segment_file.read_records(path, form)]
    except DamagedSegment:
        return None
    assert header.key == KEY
    assert 0 < header.tokens < 2**31, "the index can hold it"
    assert header.nbytes == path.stat().st_size
    return header, records
