"""A model's fingerprint: identifies its content, whatever the folder and the files are called."""

from __future__ import annotations

import json
import os
from hashlib import blake2b
from pathlib import Path

from kvd.worker.serving.model_files import Headers
from protocol.weights import read_header

FINGERPRINT_BYTES = 16
_SAMPLE_BYTES = 4096


def fingerprint(headers: Headers) -> bytes:
    """Return `FINGERPRINT_BYTES` that identify a model's configuration and weights.

    Covers all of ``config.json``, and of each weight file the size, the header, and 4 KiB at the
    beginning, in the middle and at the end of each tensor. Fine-tunes of one model differ only in
    these. A changed tensor with equal samples is not recognized. Raises ``OSError``, and
    ``BrokenFileError`` for a file that has changed since it was inspected.

    Takes 0.04 ms per tensor, and 0.2 ms if nothing of it is in the page cache.
    """
    digest = blake2b(digest_size=FINGERPRINT_BYTES)
    config = json.dumps(headers.config, sort_keys=True, separators=(",", ":"))
    _add(digest, config.encode("utf-8", "surrogatepass"))
    for file in headers.weight_files:
        _add_weights(digest, file)
    return digest.digest()


def _add(digest: blake2b, part: bytes) -> None:
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)


def _add_weights(digest: blake2b, file: Path) -> None:
    with file.open("rb") as stream:
        fd, size = stream.fileno(), file.stat().st_size
        tensors = read_header(stream, size)
        start = stream.tell()
        _add(digest, size.to_bytes(8, "little"))
        _add(digest, os.pread(fd, start, 0))
        for first, end in sorted(tensor.data_offsets for tensor in tensors.values()):
            for at in _sample_starts(first, end):
                digest.update(os.pread(fd, min(_SAMPLE_BYTES, end - at), start + at))


def _sample_starts(first: int, end: int) -> list[int]:
    if end - first <= 3 * _SAMPLE_BYTES:
        return list(range(first, end, _SAMPLE_BYTES))
    return [first, (first + end - _SAMPLE_BYTES) // 2, end - _SAMPLE_BYTES]
