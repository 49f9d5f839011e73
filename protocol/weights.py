"""Sizes of a model's weights, from the headers of its safetensors files.

A file has 8 bytes of header length, the header in JSON, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that a change of dtype converts; packed weights and their 8-bit scales stay."""
_HALVES = {"F16", "BF16"}
_MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""

Tensors = dict[str, dict[str, Any]]
"""The header's entries by tensor name: ``dtype``, ``shape`` and ``data_offsets``."""


class BrokenFileError(Exception):
    """The file is incomplete or no safetensors file. Put its name before the message."""


@dataclass(frozen=True)
class Weights:
    """Sizes of all tensors of a model."""

    tensors: int
    stored_bytes: int
    float_bytes: int
    """Bytes of floating-point tensors as stored; a change of dtype converts them."""
    float_elements: int
    half_elements: int
    """Elements of half-precision matrices, which the native library keeps as stored."""

    @classmethod
    def of(cls, tensors: Iterable[dict[str, Any]]) -> Weights:
        entries = list(tensors)
        floats = [entry for entry in entries if entry["dtype"] in _FLOATS]
        return cls(
            tensors=len(entries),
            stored_bytes=sum(map(nbytes, entries)),
            float_bytes=sum(map(nbytes, floats)),
            float_elements=sum(math.prod(entry["shape"]) for entry in floats),
            half_elements=sum(
                math.prod(entry["shape"])
                for entry in floats
                if entry["dtype"] in _HALVES and len(entry["shape"]) == 2
            ),
        )

    def in_memory(self, itemsize: int | None, *, packed: bool = False) -> int:
        """Return the bytes after floats are converted to ``itemsize`` bytes; None: as stored.

        ``packed``: the native library keeps half-precision matrices as stored.
        """
        if itemsize is None:
            return self.stored_bytes
        converted = self.stored_bytes - self.float_bytes + self.float_elements * itemsize
        return converted - self.half_elements * (itemsize - 2) if packed else converted


def nbytes(tensor: dict[str, Any]) -> int:
    start, end = tensor["data_offsets"]
    return int(end) - int(start)


def read_header(stream: BinaryIO, size: int) -> Tensors:
    """Return the header of a file of ``size`` bytes, after checking that the file is complete.

    Raises `BrokenFileError`, and the stream's `OSError`.
    """
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise BrokenFileError(f"is truncated or no safetensors file ({size} bytes)")
    try:
        header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        ends = (entry["data_offsets"][1] for entry in tensors.values())
        expected = 8 + length + max(ends, default=0)
        for entry in tensors.values():
            _ = math.prod(entry["shape"]), entry["dtype"], nbytes(entry)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BrokenFileError(f"has a broken header ({error})") from error
    if size != expected:
        word = "truncated" if size < expected else "longer than its header says"
        raise BrokenFileError(f"is {word}: {size} bytes instead of {expected}")
    return tensors
