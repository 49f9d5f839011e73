"""Encrypted record files: nothing is read that the key's owner did not write in this place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol import record_cipher, record_file
from protocol.record_cipher import RecordCipher
from protocol.record_file import DamagedFile, RecordReader, RecordWriter, read_records
from protocol.record_format import CHECK_BYTES, PIECE_BYTES, PLAIN, RecordFormat

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
HEAD_BYTES = 16
END = 1 << 63
MAPPED = record_file._MAPPED_BYTES
ANOTHER = r"another format|only 48 bytes|wrong check|end mark"


def write(path: Path, records: Sequence[bytes], form: RecordFormat) -> bytes:
    file = RecordWriter(path, form, sync=False)
    for record in records:
        file.add(record)
    assert file.finish() == path.stat().st_size
    return path.read_bytes()


def read(path: Path, form: RecordFormat) -> list[bytes]:
    return [bytes(one) for one in read_records(path, form)]


def split(data: bytes) -> list[bytes]:
    """Return the start, each record with its head and check, and the end mark."""
    at = RecordCipher.start_bytes
    pieces = [data[:at]]
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        size = HEAD_BYTES + (0 if length & END else length) + CHECK_BYTES
        pieces.append(data[at : at + size])
        at += size
    return pieces


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "a.kvs"


SIZES = st.integers(0, 300) | st.sampled_from([PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES + 5])


@given(sizes=st.lists(SIZES, max_size=6), letter=st.integers(1, 255))
@example(sizes=[PIECE_BYTES], letter=7)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(path: Path, sizes: list[int], letter: int) -> None:
    records = [bytes([letter]) * size for size in sizes]
    data = write(path, records, RecordCipher(KEY))
    assert read(path, RecordCipher(KEY)) == records
    assert len(data) == RecordCipher.start_bytes + 32 * (len(records) + 1) + sum(sizes)
    assert bytes([letter]) * 16 not in data
    assert write(path, records, RecordCipher(KEY)) != data, "equal contents look equal"


@pytest.mark.parametrize("form", [PLAIN, RecordCipher(KEY)])
def test_records_above_the_limit_of_mapped_memory_are_read(path: Path, form: RecordFormat) -> None:
    record = bytes(range(256)) * (MAPPED // 256) + b"end"
    write(path, [record, b"small"], form)
    found = list(read_records(path, form))  # all are held at once
    assert found == [record, b"small"]
    assert [one.obj.__class__ for one in found] == [mmap, bytearray]


def test_the_format_is_that_of_the_documentation(path: Path) -> None:
    """Another implementation of AES-GCM reads the file, without any code of the format."""
    records = [b"first", b"", b"p" * (PIECE_BYTES + 1)]
    magic_and_salt, *pieces = split(write(path, records, RecordCipher(KEY)))
    salt = magic_and_salt[16:]
    aead = AESGCM(HKDF(SHA256(), 32, salt, b"kvd record file").derive(KEY))
    found = [
        aead.decrypt(number.to_bytes(12, "big"), piece[HEAD_BYTES:], piece[:HEAD_BYTES])
        for number, piece in enumerate(pieces)
    ]
    assert found == [*records, b""]
    assert int.from_bytes(pieces[-1][:8], "little") == END | len(records)


def assert_damaged(path: Path, data: bytes, records: Sequence[bytes]) -> None:
    path.write_bytes(data)
    before: list[bytes] = []
    with pytest.raises(DamagedFile):
        before.extend(bytes(one) for one in read_records(path, RecordCipher(KEY)))
    assert before == list(records)[: len(before)], "a wrong record was returned"


def test_every_flipped_bit_and_every_truncation_is_found(path: Path) -> None:
    records = [b"tail", b"", b"page"]
    data = write(path, records, RecordCipher(KEY))
    for at in range(len(data)):
        for bit in range(8):
            assert_damaged(path, data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], records)
        assert_damaged(path, data[:at], records)
    assert_damaged(path, data + b"\0", records)


@given(chosen=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=7))
@settings(max_examples=150, deadline=None)
def test_no_other_sequence_of_records_is_a_file(path: Path, chosen: list[tuple[bool, int]]) -> None:
    """Reordered, repeated, missing, and spliced from another file of the same key."""
    records = [b"0" * 9, b"1" * 9, b"2" * 9, b"2" * 9, b"", b"3" * 9]
    start, *mine = split(write(path, records, RecordCipher(KEY)))
    _, *theirs = split(write(path, records, RecordCipher(KEY)))
    pieces = [(theirs if foreign else mine)[number] for foreign, number in chosen]
    if pieces != mine[:-1]:
        assert_damaged(path, b"".join([start, *pieces, mine[-1]]), records)
        counted = (END | len(pieces)).to_bytes(8, "little")
        forged = RecordWriter(path.with_suffix(".x"), PLAIN, sync=False)  # has a right head
        for _ in pieces:
            forged.add(b"")
        forged.finish()
        head = forged.path.read_bytes()[-32:-16]
        assert head[:8] == counted
        assert_damaged(path, b"".join([start, *pieces, head, mine[-1][16:]]), records)


@pytest.mark.parametrize("records", [(), (b"a record",)])
def test_files_of_another_key_or_format_are_damaged(path: Path, records: tuple[bytes]) -> None:
    forms = [PLAIN, RecordCipher(KEY), RecordCipher(OTHER_KEY), RecordCipher.with_random_key()]
    for writer in forms:
        write(path, records, writer)
        for reader in forms:
            if reader is writer:
                assert read(path, reader) == list(records)
            else:
                with pytest.raises(DamagedFile, match=ANOTHER):
                    read(path, reader)


def test_no_nonce_is_used_twice_with_a_key(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: Counter[tuple[bytes, bytes]] = Counter()
    real = record_cipher.Cipher

    def spy(aes: record_cipher.AES, mode: record_cipher.GCM) -> object:
        used[aes.key, mode.initialization_vector] += 1
        return real(aes, mode)

    monkeypatch.setattr(record_cipher, "Cipher", spy)
    cipher = RecordCipher(KEY)
    for _ in range(20):
        write(path, [b"same"] * 10, cipher)
    assert len(used) == 20 * 11, "a record or an end mark is encrypted without a new nonce"
    assert len({key for key, _ in used}) == 20
    assert KEY not in {key for key, _ in used}


def test_a_record_is_not_returned_before_it_is_verified(path: Path) -> None:
    data = bytearray(write(path, [b"p" * (3 * PIECE_BYTES)], RecordCipher(KEY)))
    data[-33] ^= 1  # the last byte of the record's check
    path.write_bytes(data)
    with RecordReader(path, RecordCipher(KEY)) as reader, pytest.raises(DamagedFile):
        next(reader)


def test_derived_secrets_differ_by_purpose_and_key() -> None:
    cipher, other = RecordCipher(KEY), RecordCipher(OTHER_KEY)
    purposes = (b"key id", b"segment keys")
    found = [one.derive(purpose) for one in (cipher, other) for purpose in purposes]
    assert len(set(found)) == 4
    assert all(len(one) == 32 for one in found)
    assert found[0] == RecordCipher(KEY).derive(b"key id")
