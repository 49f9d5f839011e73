"""Sizes of a model's weights, from the headers of its safetensors files.

A file has 8 bytes of header length, the header in JSON, and the tensors' bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta

_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types that a change of dtype converts; packed weights and their 8-bit scales stay."""
_HALVES = {"F16", "BF16"}
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
    "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 16 * 1024 * 1024
"""Room for 100,000 tensors in one file. The format allows 100 MB."""
_MIN_ENTRY_BYTES = 40
_MANY_OBJECTS = 10_000
_Size = Annotated[int, Meta(ge=0, lt=2**31)]
"""Sizes of MLX's dimensions."""
_Offset = Annotated[int, Meta(ge=0, lt=2**62)]


class Tensor(msgspec.Struct, frozen=True, gc=False):
    """An entry of the header. Offsets count from the end of the header."""

    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Offset, _Offset]

    @property
    def nbytes(self) -> int:
        start, end = self.data_offsets
        return end - start

    @property
    def is_vector(self) -> bool:
        return len(self.shape) < 2

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


Tensors = dict[str, Tensor]
"""The header's entries by tensor name."""
_entries = msgspec.json.Decoder(dict[str, msgspec.Raw])
_entry = msgspec.json.Decoder(Tensor)


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
    largest_bytes: int = 0
    """Bytes of the largest tensor as stored."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Weights:
        entries = list(tensors)
        floats = [entry for entry in entries if entry.dtype in _FLOATS]
        return cls(
            tensors=len(entries),
            stored_bytes=sum(entry.nbytes for entry in entries),
            float_bytes=sum(entry.nbytes for entry in floats),
            float_elements=sum(entry.elements for entry in floats),
            half_elements=sum(
                entry.elements
                for entry in floats
                if entry.dtype in _HALVES and len(entry.shape) == 2
            ),
            largest_bytes=max((entry.nbytes for entry in entries), default=0),
        )

    def in_memory(self, itemsize: int | None, *, packed: bool = False) -> int:
        """Return the bytes after floats are converted to ``itemsize`` bytes; None: as stored.

        ``packed``: the native library keeps half-precision matrices as stored.
        """
        if itemsize is None:
            return self.stored_bytes
        converted = self.stored_bytes - self.float_bytes + self.float_elements * itemsize
        return converted - self.half_elements * (itemsize - 2) if packed else converted


def read_header(stream: BinaryIO, size: int) -> Tensors:
    """Return the header of a file of ``size`` bytes, after checking that the file is complete.

    Raises `BrokenFileError`, and the stream's `OSError`.
    """
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > size - 8:
        raise BrokenFileError(f"is truncated or no safetensors file ({size} bytes)")
    if length > _MAX_HEADER_BYTES:
        raise BrokenFileError(f"has a header of {length} bytes, more than {_MAX_HEADER_BYTES}")
    header = stream.read(length)
    objects = header.count(b"{")
    if objects > max(_MANY_OBJECTS, length // _MIN_ENTRY_BYTES):  # they would take much memory
        raise BrokenFileError(f"has a broken header ({objects} objects in {length} bytes)")
    try:
        entries = _entries.decode(header)
        entries.pop("__metadata__", None)
        tensors = {name: _entry.decode(entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenFileError(f"has a broken header ({error})") from error
    expected = 8 + length + max((it.data_offsets[1] for it in tensors.values()), default=0)
    if size != expected:
        word = "truncated" if size < expected else "longer than its header says"
        raise BrokenFileError(f"is {word}: {size} bytes instead of {expected}")
    _check_places(tensors)
    return tensors


def _check_places(tensors: Tensors) -> None:
    """Check that each tensor has the bytes of its shape, and shares none with another."""
    for name, tensor in tensors.items():
        itemsize = _ITEM_BYTES.get(tensor.dtype)
        if itemsize is not None and tensor.elements * itemsize != tensor.nbytes:
            raise BrokenFileError(
                f"has a broken header (tensor {name:.100}: {tensor.nbytes} bytes for"
                f" {tensor.dtype:.20} of shape {list(tensor.shape[:8])})"
            )
    places = sorted((it.data_offsets for it in tensors.values()), key=lambda it: (it[1], it[0]))
    if any(start < end for (_, end), (start, _) in pairwise(places)):
        raise BrokenFileError("has a broken header (tensors overlap)")
