"""Formats of an engine's files: encrypted if the daemon named a key.

`cryptography` takes 28 ms and 10 MB, so it is imported only then.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from protocol.key_file import read_key
from protocol.record_format import PLAIN, RecordFormat
from protocol.worker import LoadModel

if TYPE_CHECKING:
    from protocol.record_cipher import RecordCipher


def segment_cipher(command: LoadModel) -> RecordCipher | None:
    """Return the cipher of segments; None: they are not encrypted. Raises `OSError`."""
    if command.key_file is None:
        return None
    from protocol.record_cipher import RecordCipher  # noqa: PLC0415

    return RecordCipher(read_key(Path(command.key_file)))


def swap_format(command: LoadModel) -> RecordFormat:
    """Return the format of swapped rows. Only this process can read encrypted ones."""
    if command.key_file is None:
        return PLAIN
    from protocol.record_cipher import RecordCipher  # noqa: PLC0415

    return RecordCipher.with_random_key()
