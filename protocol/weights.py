"""What a model's weights take, from the headers of its safetensors files: nothing is loaded.

The format: 8 bytes of header length, the header in JSON, then the tensors' bytes. For workers, who
refuse broken files with it, and for the daemon's forecasts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

_FLOATS = {"F64", "F32", "F16", "BF16"}
_HALVES = {"F16", "BF16"}
"""What a change of dtype resizes; packed weights and their 8-bit scales stay."""
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""

Tensors = dict[str, dict[str, Any]]
"""By name: ``dtype``, ``shape`` and ``data_offsets``, as the header says."""


class BrokenFileError(Exception):
    """The file is none, or not whole; the text goes on from the file's name."""


@dataclass(frozen=True)
class Weights:
    """All tensors of a model."""

    tensors: int
    stored_bytes: int
    """Of all tensors."""
    float_bytes: int
    """Of the tensors in a floating type, as stored: a change of dtype resizes them."""
    float_elements: int
    """Of the same."""
    half_elements: int
    """Of those, in matrices of half floats: the native library keeps them as they are stored."""

    @classmethod
    def of(cls, tensors: Iterable[dict[str, Any]]) -> Weights:
        """Sum them up."""
        everything = list(tensors)
        floats = [one for one in everything if one["dtype"] in _FLOATS]
        return cls(
            tensors=len(everything),
            stored_bytes=sum(map(nbytes, everything)),
            float_bytes=sum(map(nbytes, floats)),
            float_elements=sum(math.prod(one["shape"]) for one in floats),
            half_elements=sum(
                math.prod(one["shape"])
                for one in floats
                if one["dtype"] in _HALVES and len(one["shape"]) == 2
            ),
        )

    def in_memory(self, itemsize: int | None, *, packed: bool = False) -> int:
        """Return the bytes when floats are converted to so many bytes each; None: as stored.

        ``packed``: the native library keeps matrices of half floats as they are.
        """
        if itemsize is None:
            return self.stored_bytes
        converted = self.stored_bytes - self.float_bytes + self.float_elements * itemsize
        return converted - self.half_elements * (itemsize - 2) if packed else converted


def nbytes(tensor: dict[str, Any]) -> int:
    """Return a tensor's bytes in its file."""
    start, end = tensor["data_offsets"]
    return int(end) - int(start)


def read_header(stream: BinaryIO, size: int) -> Tensors:
    """Return the tensors of a file of so many bytes, after a look at whether all of them exist.

    Raises `BrokenFileError`, and `OSError` of the stream.
    """
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
        raise BrokenFileError(f"is truncated or no safetensors file ({size} bytes)")
    try:
        header = json.loads(stream.read(length))
        tensors = {name: one for name, one in header.items() if name != "__metadata__"}
        expected = 8 + length + max((one["data_offsets"][1] for one in tensors.values()), default=0)
        for one in tensors.values():
            _ = math.prod(one["shape"]), one["dtype"], nbytes(one)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BrokenFileError(f"has a broken header ({error})") from error
    if size != expected:
        word = "truncated" if size < expected else "longer than its header says"
        raise BrokenFileError(f"is {word}: {size} bytes instead of {expected}")
    return tensors
