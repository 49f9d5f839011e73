"""Encrypted record files (`protocol.record_file`): AES-256 in Galois/counter mode.

::

    start                magic (16 bytes), salt (32)

The salt is random, and every file has a key of its own: HKDF-SHA256 of the cipher's key and the
salt. The nonce is the number of the record in its file, so no nonce is used twice with a key. The
head is associated data, and the tag is the record's check. A record is therefore valid only in its
place and in its file, and nothing without the key can make one.
"""

from __future__ import annotations

import os
from itertools import count

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import (
    AEADDecryptionContext,
    AEADEncryptionContext,
    Cipher,
)
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from protocol.record_format import PIECE_BYTES, FileFormat, Opening, Sealing

MAGIC = b"kvd encrypted 1\n"
SALT_BYTES = 32
_NONCE_BYTES = 12
_KEY_BYTES = 32


class RecordCipher:
    """A `RecordFormat` that encrypts. ``key``: at least 32 random bytes."""

    start_bytes = len(MAGIC) + SALT_BYTES

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def with_random_key(cls) -> RecordCipher:
        """Return a cipher whose files cannot be read without this object."""
        return cls(os.urandom(_KEY_BYTES))

    def derive(self, purpose: bytes, salt: bytes | None = None) -> bytes:
        """Return 32 bytes for one purpose. They reveal nothing about the key or other purposes."""
        return HKDF(SHA256(), _KEY_BYTES, salt, b"kvd " + purpose).derive(self._key)

    def create(self) -> tuple[bytes, FileFormat]:
        salt = os.urandom(SALT_BYTES)
        return MAGIC + salt, self._file(salt)

    def open(self, start: bytes) -> FileFormat | None:
        return self._file(start[len(MAGIC) :]) if start.startswith(MAGIC) else None

    def _file(self, salt: bytes) -> FileFormat:
        return _FileCipher(self.derive(b"record file", salt))


class _FileCipher:
    """Encrypts or decrypts the records of one file."""

    piece_bytes = PIECE_BYTES

    def __init__(self, key: bytes) -> None:
        self._aes = AES(key)
        self._numbers = count()

    def seal_next(self, head: bytes) -> Sealing:
        return _Encryption(self._next().encryptor(), head)

    def open_next(self, head: bytes, check: bytes) -> Opening:
        return _Decryption(self._next().decryptor(), head, check)

    def _next(self) -> Cipher[GCM]:
        return Cipher(self._aes, GCM(next(self._numbers).to_bytes(_NONCE_BYTES, "big")))


class _Encryption:
    def __init__(self, encryptor: AEADEncryptionContext, head: bytes) -> None:
        encryptor.authenticate_additional_data(head)
        self._encryptor = encryptor
        self._buffer = bytearray(PIECE_BYTES)

    def seal(self, piece: memoryview) -> memoryview:
        size = self._encryptor.update_into(piece, self._buffer)
        return memoryview(self._buffer)[:size]

    def check(self) -> bytes:
        self._encryptor.finalize()
        return self._encryptor.tag


class _Decryption:
    def __init__(self, decryptor: AEADDecryptionContext, head: bytes, check: bytes) -> None:
        decryptor.authenticate_additional_data(head)
        self._decryptor = decryptor
        self._check = check

    def open(self, piece: memoryview) -> None:
        self._decryptor.update_into(piece, piece)

    def verify(self) -> bool:
        try:
            self._decryptor.finalize_with_tag(self._check)
        except InvalidTag:
            return False
        return True
